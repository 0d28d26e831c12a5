// The charts of report and live page. All text reaches the page through textContent and the canvas: nothing of a run
// is ever read as HTML. The script that follows has `changed()`, which is called when other data is wanted.

const LAYOUT = JSON.parse(document.getElementById("layout").textContent);
const TAP = 10, DOUBLE_TAP = 350; // pixels that a tap may move, milliseconds between two taps
const HEIGHT = 220, LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 24;
const $ = (id) => document.getElementById(id);

const state = {
  runs: [], hidden: new Set(), begin: null, end: null, smooth: LAYOUT.smooth, axis: "step", log: false, hover: null,
};
const charts = [];

function make(tag, text, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = String(text);
  element.append(...children);
  return element;
}

function drawing(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function lineSample(style, dots, raw) {
  const parts = [drawing("line", { class: `s${style}${raw ? " raw" : ""}`, x1: 1, x2: 25, y1: 5, y2: 5 })];
  if (dots) parts.push(drawing("circle", { class: `d${style}`, cx: 13, cy: 5, r: 3 }));
  return drawing("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" }, ...parts);
}

function shadeSample(fill) {
  const square = drawing("rect", { width: 10, height: 10, rx: 2, fill, opacity: 0.45 });
  return drawing("svg", { class: "shade", viewBox: "0 0 10 10", "aria-hidden": "true" }, square);
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const styleOf = (index) => index % LAYOUT.dashes.length;
const shownRuns = () => state.runs.filter((run) => !state.hidden.has(run.title));
const single = () => state.runs.length === 1;

class Chart {
  constructor({ title, unit, zero, log }) {
    Object.assign(this, { zero, logs: log, lines: [], plain: unit ? `${title} (${unit})` : title });
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title);
    this.canvas.tabIndex = 0;
    this.title = make("b", this.plain);
    this.readout = make("span");
    this.key = make("ul");
    this.key.className = "key";
    this.tip = make("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.figure = make("figure", null, make("figcaption", null, this.title, this.readout), this.key, this.canvas, this.tip);
    this.drag = null; // the place at which a drag began
    this.pinch = null; // the places under two fingers
    this.fingers = new Map(); // pointer → its place as a share of the width
    this.tap = { time: 0, x: 0, begun: 0 };
    const on = (name, listener) => this.canvas.addEventListener(name, listener);
    on("pointerdown", (e) => this.press(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.release(e, true));
    on("pointercancel", (e) => this.release(e, false));
    on("pointerleave", (e) => { if (e.pointerType === "mouse") this.leave(); });
    on("dblclick", () => show(null, null));
    on("keydown", (e) => this.type(e));
    on("blur", () => this.leave());
  }

  shareAt(event) {
    return Math.min(1, Math.max(0, (event.offsetX - LEFT) / (this.scale.width - LEFT - RIGHT)));
  }

  placeAt(event) {
    return this.scale ? this.scale.low + this.shareAt(event) * (this.scale.high - this.scale.low) : null;
  }

  point(at) {
    state.hover = at;
    state.pointed = this;
    drawSoon();
  }

  leave() {
    this.readout.removeAttribute("aria-live");
    this.point(null);
  }

  type(event) {
    const turns = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") show(null, null);
    if (!(event.key in turns) || !this.scale) return;
    event.preventDefault();
    const { low, high } = this.scale, from = state.hover ?? (event.key === "ArrowLeft" ? high : low);
    this.readout.setAttribute("aria-live", "polite");
    this.point(Math.min(high, Math.max(low, from + turns[event.key] * Math.max((high - low) / 50, state.axis === "step" ? 1 : 0))));
  }

  press(event) {
    if (!this.scale || event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, this.shareAt(event));
    this.point(this.placeAt(event));
    if (this.fingers.size === 1) {
      this.drag = state.hover;
      this.tap.begun = event.offsetX;
    } else {
      this.drag = state.hover = null;
      const { low, high } = this.scale;
      this.pinch = [...this.fingers.values()].slice(0, 2).map((share) => low + share * (high - low));
    }
  }

  move(event) {
    if (this.fingers.has(event.pointerId) && this.scale) this.fingers.set(event.pointerId, this.shareAt(event));
    if (this.pinch) {
      [state.begin, state.end] = pinched(this.pinch, [...this.fingers.values()], wholeRange()) ?? [null, null];
      drawSoon();
    } else this.point(this.placeAt(event));
  }

  release(event, meant) {
    if (!this.fingers.delete(event.pointerId)) return;
    const from = this.drag, to = this.placeAt(event);
    this.drag = null;
    if (this.pinch) {
      if (this.fingers.size > 1) return;
      this.pinch = null;
      show(state.begin, state.end);
    } else if (meant && event.pointerType !== "mouse" && Math.abs(event.offsetX - this.tap.begun) < TAP) this.tapped(event);
    else if (meant && from !== null && to !== null && Math.abs(to - from) >= least(wholeRange()))
      show(Math.min(from, to), Math.max(from, to));
    drawSoon();
  }

  tapped(event) {
    const again = event.timeStamp - this.tap.time < DOUBLE_TAP && Math.abs(event.offsetX - this.tap.x) < 4 * TAP;
    this.tap = { ...this.tap, time: again ? 0 : event.timeStamp, x: event.offsetX };
    if (again) show(null, null);
  }

  // With several runs a chart has one line, which each run is drawn by.
  curves() {
    const found = [];
    state.runs.forEach((run, index) => {
      if (state.hidden.has(run.title)) return;
      for (const { series, label, dots, style } of this.lines) {
        if (!run.curves[series]) continue;
        const [steps, values, means] = run.curves[series];
        const xs = steps.map((step) => along(run.axes, state.axis, step));
        const name = single() ? (this.lines.length > 1 ? label : "") : run.title;
        found.push({ name, dots, xs, steps, values, style: single() ? style : styleOf(index), means: state.smooth > 0 && means ? means : null });
      }
    });
    return found.filter((curve) => curve.values.some((value) => value !== null));
  }

  // The first chart of a run shows its phases and where advice was given.
  get first() {
    return charts[0] === this;
  }

  draw() {
    const width = this.canvas.clientWidth || 440, ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(HEIGHT * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    pen.font = "12px system-ui, sans-serif";
    this.scale = null;
    this.readout.textContent = "";
    this.tip.hidden = true;
    const curves = this.curves(), log = state.log && this.logs;
    this.caption(curves, log);
    if (!curves.length) return this.nothing(pen, "no finite value recorded");
    const [low, high] = this.stretch(curves);
    this.scale = { low, high, width };
    const fits = (v, x) => v !== null && (!log || v > 0) && x >= low && x <= high;
    const heights = curves.flatMap((c) => c.values.filter((v, i) => fits(v, c.xs[i])));
    if (!heights.length) return this.nothing(pen, "nothing recorded in this part");
    this.paint(pen, curves, { ...this.scale, log, ...this.range(heights, log) });
  }

  range(heights, log) {
    let least = heights.reduce((a, b) => Math.min(a, b)), most = heights.reduce((a, b) => Math.max(a, b));
    if (this.zero) least = Math.min(least, 0);
    if (log) [least, most] = [Math.log10(least), Math.log10(most)];
    const margin = 0.05 * (most - least) || 0.05 * Math.abs(most) || 1;
    return { bottom: log || least < 0 ? least - margin : Math.max(0, least - margin), top: most + margin };
  }

  paint(pen, curves, frame) {
    const { low, high, bottom, top, log, width } = frame;
    const across = (x) => LEFT + ((x - low) / (high - low)) * (width - LEFT - RIGHT);
    const down = (y) => HEIGHT - BOTTOM - (((log ? Math.log10(y) : y) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    if (this.first && shownRuns().length === 1) this.background(pen, width, across);
    this.axes(pen, across, frame);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 4);
    pen.clip();
    const positive = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
    for (const { means, ...curve } of curves) {
      // The raw values stay, pale, behind their mean.
      this.line(pen, { ...curve, values: positive(curve.values) }, across, down, means ? 0.3 : 1);
      if (means) this.line(pen, { ...curve, values: positive(means) }, across, down, 1);
    }
    pen.restore();
    this.pointer(pen, curves, across, frame);
  }

  nothing(pen, text) {
    pen.fillStyle = css("--pale");
    pen.fillText(text, LEFT, HEIGHT / 2);
  }

  caption(curves, log) {
    const text = `${this.plain}${log ? ", log scale" : ""}`;
    if (this.title.textContent !== text) this.title.textContent = text;
    const entries = [];
    // Where several curves have means, their names are of these.
    const several = curves.filter((curve) => curve.means).length > 1;
    for (const { name, style, dots, means } of single() && curves.length > 1 ? curves : []) {
      if (means && !several) entries.push([`${name}, smoothed`, () => lineSample(style, dots, false)]);
      entries.push([name, () => lineSample(style, dots, means !== null && !several)]);
    }
    if (this.first && single()) {
      const [run] = state.runs, seen = Object.entries(LAYOUT.phases).filter(([label]) => run.bands.some((band) => band[2] === label));
      entries.push(...seen.map(([label, fill]) => [label, () => shadeSample(fill)]));
      if (run.marks.length) entries.push(["advice", () => drawing("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" }, drawing("line", { class: "mark", x1: 1, x2: 25, y1: 5, y2: 5 }))]);
    }
    const names = entries.map(([name]) => name).join("\n");
    if (this.key.dataset.names === names) return;
    this.key.dataset.names = names;
    this.key.hidden = !entries.length;
    this.key.replaceChildren(...entries.map(([name, sample]) => make("li", null, sample(), name)));
  }

  stretch(curves) {
    let low = state.begin ?? Math.min(...curves.map((c) => c.xs[0]));
    let high = state.end ?? Math.max(...curves.map((c) => c.xs[c.xs.length - 1]));
    if (low >= high) [low, high] = [low - 1, high + 1];
    return [low, high];
  }

  background(pen, width, across) {
    const [run] = shownRuns(), at = (step) => across(along(run.axes, state.axis, step));
    const clip = (x) => Math.min(width - RIGHT, Math.max(LEFT, x));
    pen.globalAlpha = 0.15;
    for (const [begin, end, label] of run.bands) {
      if (!LAYOUT.phases[label]) continue;
      pen.fillStyle = LAYOUT.phases[label];
      pen.fillRect(clip(at(begin)), TOP, clip(at(end)) - clip(at(begin)), HEIGHT - TOP - BOTTOM);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = css("--advice");
    pen.setLineDash([4, 3]);
    for (const step of run.marks) if (at(step) >= LEFT && at(step) <= width - RIGHT) this.upright(pen, at(step));
    pen.setLineDash([]);
  }

  upright(pen, x) {
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, HEIGHT - BOTTOM);
    pen.stroke();
  }

  axes(pen, across, { low, high, bottom, top, log, width }) {
    pen.fillStyle = css("--pale");
    pen.strokeStyle = css("--line");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const height of ticks(bottom, top, 4)) {
      const y = HEIGHT - BOTTOM - ((height - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.stroke();
      pen.fillText(figure(log ? 10 ** height : height), LEFT - 6, y + 4);
    }
    const [unit, by] = axisUnit(state.axis, high), edge = width - RIGHT - pen.measureText(unit).width - 8;
    pen.fillText(unit, width - RIGHT, HEIGHT - 7);
    pen.textAlign = "center";
    for (const place of ticks(low / by, high / by, width < 420 ? 3 : 5)) {
      const text = figure(place), x = across(place * by);
      if (x + pen.measureText(text).width / 2 < edge) pen.fillText(text, x, HEIGHT - 7);
    }
    pen.textAlign = "left";
  }

  line(pen, { xs, values, style, dots }, across, down, strength) {
    pen.strokeStyle = pen.fillStyle = css(`--c${style}`);
    pen.globalAlpha = strength;
    pen.lineWidth = strength < 1 ? 1 : 2;
    pen.setLineDash(strength < 1 ? [] : LAYOUT.dashes[style]);
    pen.beginPath();
    const marked = [];
    let broken = true;
    for (let i = 0; i < xs.length; i++) {
      if (values[i] === null) { broken = true; continue; }
      const x = across(xs[i]), y = down(values[i]);
      if (broken) pen.moveTo(x, y);
      else pen.lineTo(x, y);
      if (dots || (broken && (i + 1 === xs.length || values[i + 1] === null))) marked.push([x, y]);
      broken = false;
    }
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    for (const [x, y] of marked) { pen.moveTo(x + 3, y); pen.arc(x, y, 3, 0, 7); }
    pen.fill();
    pen.globalAlpha = 1;
  }

  pointer(pen, curves, across, { low, high, width }) {
    if (state.hover === null || state.hover < low || state.hover > high) return;
    const x = across(state.hover);
    if (this.drag !== null) {
      pen.globalAlpha = 0.15;
      pen.fillStyle = css("--ink");
      pen.fillRect(across(this.drag), TOP, x - across(this.drag), HEIGHT - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = css("--pale");
    this.upright(pen, x);
    const said = readout(curves, state.hover);
    this.readout.textContent = brief(said);
    if (state.pointed === this && said.length > 1) this.tell(said, x, width);
  }

  // The values of several curves, in a box beside the pointer.
  tell(said, x, width) {
    const rows = said.map(({ style, name, text, step, dots }) =>
      make("div", null, lineSample(style, dots, false), make("span", name), make("b", text), make("small", `step ${step}`)));
    this.tip.replaceChildren(...rows);
    this.tip.hidden = false;
    const box = this.tip.offsetWidth, place = this.canvas.offsetLeft + x;
    this.tip.style.left = `${Math.max(0, x > width / 2 ? place - box - 14 : Math.min(place + 14, this.figure.clientWidth - box))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + TOP}px`;
  }
}

// The ends of all shown runs on the axis.
function wholeRange() {
  const ends = shownRuns().map((run) => run.range.map((step) => along(run.axes, state.axis, step)));
  return [Math.min(...ends.map((end) => end[0])), Math.max(...ends.map((end) => end[1]))];
}

// The shortest stretch that a drag enlarges to.
const least = ([first, last]) => (state.axis === "step" ? 2 : (last - first) / 1000);

function drawAll() {
  charts.forEach((chart) => chart.draw());
  heat.maps.forEach((map) => map.draw());
}

let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawAll(); });
}

function show(begin, end) {
  const whole = begin === null || state.axis !== "step";
  [state.begin, state.end] = whole ? [begin, end] : [Math.floor(begin), Math.ceil(end)];
  $("whole").hidden = begin === null;
  changed();
  drawSoon();
}

// The runs' names with samples of their lines; a box hides a run.
function legend() {
  const names = state.runs.map((run) => run.title).join("\n");
  $("runs").hidden = single();
  if (single() || $("runs").dataset.names === names) return;
  $("runs").dataset.names = names;
  $("runs").replaceChildren(...state.runs.map((run, index) => {
    const box = make("input");
    box.type = "checkbox";
    box.checked = !state.hidden.has(run.title);
    box.addEventListener("change", () => {
      if (box.checked) state.hidden.delete(run.title);
      else state.hidden.add(run.title);
      drawSoon();
    });
    return make("li", null, make("label", null, box, lineSample(styleOf(index), false, false), make("span", run.title)));
  }));
}

// Takes the charts that the runs have now: those that stay keep their elements.
function arrange(specs) {
  const before = charts.map((chart) => chart.plain).join("\n"), known = new Map(charts.map((chart) => [chart.plain, chart]));
  charts.length = 0;
  for (const spec of specs) {
    const made = new Chart(spec), chart = known.get(made.plain) ?? made;
    chart.lines = spec.lines;
    charts.push(chart);
  }
  if (charts.map((chart) => chart.plain).join("\n") !== before)
    $("curves").replaceChildren(...[...charts, ...heat.maps].map((chart) => chart.figure));
}

function begin() {
  $("smooth").value = state.smooth;
  $("smooth").addEventListener("input", (event) => {
    state.smooth = event.target.type === "checkbox" ? Number(event.target.checked) : Number(event.target.value);
    changed();
    drawSoon();
  });
  $("axis").addEventListener("change", (event) => { state.axis = event.target.value; show(null, null); });
  $("log").addEventListener("change", (event) => { state.log = event.target.checked; drawSoon(); });
  $("whole").addEventListener("click", () => show(null, null));
  addEventListener("resize", drawSoon);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
}
