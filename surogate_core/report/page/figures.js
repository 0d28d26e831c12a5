"use strict";
// What the page shows as text, and the arithmetic of its charts: functions without a document, which node can run too.

function figure(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, by, unit] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return `${Number((value / by).toPrecision(4))}${unit}`;
  return size === 0 ? "0" : size >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function duration(seconds) {
  if (seconds === null || !isFinite(seconds)) return "–";
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

function gibibytes(bytes) {
  const size = bytes / 2 ** 30;
  return `${size.toFixed(size < 10 ? 2 : 1)} GiB`;
}

// [name, value] of the run's latest figures. What was never measured has no tile.
function tiles(run) {
  const { latest } = run, found = [];
  const add = (name, value, text) => { if (value !== undefined && value !== null) found.push([name, text(value)]); };
  const orNot = (name, series) => {
    if (run.recorded.includes(series) || (series === "loss" && run.step)) found.push([name, latest[series] === null ? "not finite" : figure(latest[series])]);
  };
  orNot("loss", "loss");
  orNot("held-out loss", "eval");
  add("learning rate", latest.lr, figure);
  orNot("gradient norm", "grad_norm");
  add("tokens/s", latest.tokens_per_second, figure);
  if (run.step) add("tokens", latest.total_tokens, figure);
  add("peak memory", latest.peak_memory_bytes, gibibytes);
  add("phase", run.phase, String);
  add("speed of light", latest.speed_of_light, (share) => `${(share * 100).toFixed(1)} %`);
  const power = latest["gpu.power_watts"] ?? null;
  add("GPU", latest["gpu.utilization"], (share) => `${Math.round(share * 100)} %${power === null ? "" : ` · ${Math.round(power)} W`}`);
  return found;
}

// One line on how the runs are doing.
function outcome(runs) {
  if (runs.length > 1) {
    const counts = new Map();
    for (const run of runs) counts.set(run.outcome, (counts.get(run.outcome) ?? 0) + 1);
    return [...counts].map(([what, count]) => `${count} ${what}`).join(", ");
  }
  const [run] = runs;
  if (run.over && !run.step) return `${run.outcome} before its first step${run.message ? `: ${run.message}` : ""}`;
  const eta = run.over || !run.steps || run.seconds === null ? "" : ` · ${duration((run.steps - run.step) * run.seconds)} to go`;
  const task = run.task ? ` · ${run.task.task} ${run.task.done}${run.task.total ? `/${run.task.total}` : ""}` : "";
  return `${run.outcome} · step ${run.step} of ${run.steps ?? "?"}${eta}${task}`;
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((f) => f * power).find((w) => w >= rough);
  const found = [];
  for (let n = Math.ceil(low / width); n * width <= high; n++) found.push(n * width);
  return found;
}

// The place of the step that is nearest to `at`.
function nearest(steps, at) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle;
    else high = middle;
  }
  return at - steps[low] < steps[high] - at ? low : high;
}

// What curves say at a step: each value with the step it was measured at, and nothing where a curve has no step near.
function readout(curves, at) {
  const said = [];
  let shown = null;
  for (const { name, steps, values, means, dots } of curves) {
    if (!steps.length || at < steps[0] - 1 || at > steps[steps.length - 1] + 1) continue;
    const place = nearest(steps, at), value = values[place] === null ? "not finite" : figure(values[place]);
    const whose = name ? `${name} ` : "", mean = means ? means[place] : null;
    if (!dots) shown ??= steps[place];
    const when = dots || steps[place] !== shown ? ` at ${steps[place]}` : "";
    said.push(`${whose}${dots ? "held-out " : ""}${value}${mean === null ? "" : ` (mean ${figure(mean)})`}${when}`);
  }
  return `${shown === null ? "" : `step ${shown}: `}${said.join(" · ")}`;
}

// The stretch of steps that puts `steps` (two of them) at `shares` of the width, inside `range`; null: the whole range.
function pinched(steps, shares, range) {
  const [first, last] = range, apart = shares[1] - shares[0];
  const span = Math.abs(apart) < 0.02 ? Infinity : (steps[1] - steps[0]) / apart;
  if (!(span > 0) || span >= last - first) return null;
  const wide = Math.max(span, 2), low = Math.min(Math.max(steps[0] - shares[0] * wide, first), last - wide);
  return [low, low + wide];
}
