// The arithmetic of the charts: functions without a document, which node can run too.

function figure(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, by, unit] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return `${Number((value / by).toPrecision(4))}${unit}`;
  return size === 0 ? "0" : size >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((f) => f * power).find((w) => w >= rough);
  const found = [];
  for (let n = Math.ceil(low / width); n * width <= high; n++) found.push(n * width);
  return found;
}

// The place of the value that is nearest to `at`; values rise.
function nearest(steps, at) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle;
    else high = middle;
  }
  return at - steps[low] < steps[high] - at ? low : high;
}

// Where a step is on an axis (step, tokens or time): between the places that the run has recorded.
function along(axes, axis, step) {
  const { step: steps, [axis]: places } = axes;
  if (axis === "step" || !steps.length) return step;
  const last = steps.length - 1;
  if (step <= steps[0]) return places[0];
  if (step >= steps[last]) return places[last];
  let low = 0, high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return places[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (places[high] - places[low]);
}

// What curves say at a place of the axis: [style, name, text] of each, with the step it was measured at.
function readout(curves, at) {
  const said = [];
  for (const { name, style, xs, steps, values, means, dots } of curves) {
    const reach = xs.length > 1 ? (xs[xs.length - 1] - xs[0]) / (xs.length - 1) : 1;
    if (!xs.length || at < xs[0] - reach || at > xs[xs.length - 1] + reach) continue;
    const place = nearest(xs, at), value = values[place] === null ? "not finite" : figure(values[place]);
    const mean = means && means[place] !== null ? ` (mean ${figure(means[place])})` : "";
    said.push({ style, name, text: `${value}${mean}`, step: steps[place], dots });
  }
  return said;
}

// One line for the head of a chart.
function brief(said) {
  if (!said.length) return "";
  const { step } = said.find((one) => !one.dots) ?? said[0];
  const parts = said.map((one) => `${one.name ? `${one.name} ` : ""}${one.text}${one.step === step ? "" : ` at ${one.step}`}`);
  return `step ${step}: ${parts.join(" · ")}`;
}

// The unit of an axis of this width, and what a value is divided by.
function axisUnit(axis, most) {
  if (axis !== "time") return [axis, 1];
  return most >= 7200 ? ["hours", 3600] : most >= 180 ? ["minutes", 60] : ["seconds", 1];
}

// The stretch of the axis that puts `steps` (two places of it) at `shares` of the width, inside `range`; null: the whole range.
function pinched(steps, shares, range) {
  const [first, last] = range, apart = shares[1] - shares[0];
  const span = Math.abs(apart) < 0.02 ? Infinity : (steps[1] - steps[0]) / apart;
  if (!(span > 0) || span >= last - first) return null;
  const wide = Math.max(span, 2), low = Math.min(Math.max(steps[0] - shares[0] * wide, first), last - wide);
  return [low, low + wide];
}
