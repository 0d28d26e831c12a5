"use strict";
// All text reaches the page through textContent and the canvas: nothing of a run is ever read as HTML.

const LAYOUT = JSON.parse(document.getElementById("layout").textContent);
const TOKEN = new URLSearchParams(location.search).get("token");
const EVERY = 2000; // milliseconds between two requests while a run goes on
const HEIGHT = 210, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22, LOG_RATIO = 200;
const $ = (id) => document.getElementById(id);

const state = { runs: [], texts: [], hidden: new Set(), begin: null, end: null, smooth: 0, revision: "", hover: null };
const charts = [];

function make(tag, text, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = String(text);
  element.append(...children);
  return element;
}

async function get(path, query = {}) {
  const reply = await fetch(`${path}?${new URLSearchParams({ ...query, token: TOKEN })}`);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

// ------------------------------------------------------------------------------ figures

function figure(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, by, unit] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return `${Number((value / by).toPrecision(4))}${unit}`;
  return size === 0 ? "0" : size >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function duration(seconds) {
  if (!isFinite(seconds)) return "–";
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

const color = (index) => LAYOUT.colours[index % LAYOUT.colours.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An exponential mean of the values that are there; a gap stays one.
function smoothed(values) {
  const keep = state.smooth;
  if (!keep) return values;
  let mean = null;
  return values.map((v) => (v === null ? null : (mean = mean === null ? v : keep * mean + (1 - keep) * v)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((f) => f * power).find((w) => w >= rough);
  const found = [];
  for (let n = Math.ceil(low / width); n * width <= high; n++) found.push(n * width);
  return found;
}

// ------------------------------------------------------------------------------- charts

class Chart {
  constructor({ title, series, unit }) {
    this.series = series;
    this.canvas = make("canvas");
    this.readout = make("span");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title);
    const caption = make("figcaption", unit ? `${title} (${unit})` : title, this.readout);
    this.figure = make("figure", null, caption, this.canvas);
    this.drag = null;
    this.canvas.addEventListener("pointerdown", (e) => { this.drag = this.stepAt(e); });
    this.canvas.addEventListener("pointermove", (e) => { state.hover = this.stepAt(e); drawSoon(); });
    this.canvas.addEventListener("pointerleave", () => { state.hover = null; this.drag = null; drawSoon(); });
    this.canvas.addEventListener("pointerup", (e) => this.enlarge(this.drag, this.stepAt(e)));
    this.canvas.addEventListener("dblclick", () => show(null, null));
  }

  stepAt(event) {
    if (!this.scale) return null;
    const { low, high, width } = this.scale;
    const share = (event.offsetX - LEFT) / (width - LEFT - RIGHT);
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  }

  enlarge(from, to) {
    this.drag = null;
    if (from === null || to === null || Math.abs(to - from) < 2) return;
    show(Math.floor(Math.min(from, to)), Math.ceil(Math.max(from, to)));
  }

  curves() {
    const found = [];
    state.runs.forEach((run, index) => {
      if (state.hidden.has(run.title)) return;
      const [steps, values] = run.curves[this.series];
      found.push({ run, index, steps, values: smoothed(values), dots: false });
      if (this.series === "loss" && run.curves.eval[0].length) {
        const [at, losses] = run.curves.eval;
        found.push({ run, index, steps: at, values: losses, dots: true });
      }
    });
    return found.filter((c) => c.values.some((v) => v !== null));
  }

  draw() {
    const curves = this.curves(), always = ["loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_bytes"];
    this.figure.hidden = !curves.length && !always.includes(this.series);
    if (this.figure.hidden) return;
    const width = this.canvas.clientWidth || 440, ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(HEIGHT * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    pen.font = "11px system-ui, sans-serif";
    this.scale = null;
    this.readout.textContent = "";
    if (!curves.length) {
      pen.fillStyle = css("--pale");
      pen.fillText("nothing recorded", LEFT, HEIGHT / 2);
      return;
    }
    const [low, high] = this.stretch(curves);
    const inside = (c, i) => c.steps[i] >= low && c.steps[i] <= high;
    const heights = curves.flatMap((c) => c.values.filter((v, i) => v !== null && inside(c, i)));
    if (!heights.length) return;
    let least = heights.reduce((a, b) => Math.min(a, b)), most = heights.reduce((a, b) => Math.max(a, b));
    const log = least > 0 && most / least > LOG_RATIO;
    if (log) [least, most] = [Math.log10(least), Math.log10(most)];
    const margin = 0.05 * (most - least) || 0.05 * Math.abs(most) || 1;
    const bottom = log || least < 0 ? least - margin : Math.max(0, least - margin), top = most + margin;
    const across = (x) => LEFT + ((x - low) / (high - low)) * (width - LEFT - RIGHT);
    const down = (y) => HEIGHT - BOTTOM - (((log ? Math.log10(y) : y) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    this.scale = { low, high, width };
    this.background(pen, width, across);
    this.axes(pen, width, across, { low, high, bottom, top, log });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 4);
    pen.clip();
    for (const curve of curves) this.line(pen, curve, across, down);
    pen.restore();
    this.pointer(pen, curves, across);
  }

  stretch(curves) {
    const firsts = curves.map((c) => c.steps[0]), lasts = curves.map((c) => c.steps[c.steps.length - 1]);
    let low = state.begin ?? Math.min(...firsts), high = state.end ?? Math.max(...lasts);
    if (low >= high) [low, high] = [low - 1, low + 1];
    return [low, high];
  }

  background(pen, width, across) {
    const shown = state.runs.filter((run) => !state.hidden.has(run.title));
    if (shown.length !== 1) return;
    const clip = (x) => Math.min(width - RIGHT, Math.max(LEFT, across(x)));
    for (const [begin, end, label] of shown[0].bands) {
      if (!LAYOUT.phases[label]) continue;
      pen.globalAlpha = 0.13;
      pen.fillStyle = LAYOUT.phases[label];
      pen.fillRect(clip(begin), TOP, clip(end) - clip(begin), HEIGHT - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = "#d97706";
    pen.setLineDash([4, 3]);
    for (const advice of shown[0].advice) {
      const at = across(Number(advice.step));
      if (at < LEFT || at > width - RIGHT) continue;
      pen.beginPath();
      pen.moveTo(at, TOP);
      pen.lineTo(at, HEIGHT - BOTTOM);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  axes(pen, width, across, { low, high, bottom, top, log }) {
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
    pen.textAlign = "center";
    for (const step of ticks(low, high, 5)) pen.fillText(figure(step), across(step), HEIGHT - 6);
  }

  line(pen, { steps, values, index, dots }, across, down) {
    pen.strokeStyle = pen.fillStyle = color(index);
    pen.lineWidth = 1.3;
    pen.beginPath();
    let broken = true;
    for (let i = 0; i < steps.length; i++) {
      if (values[i] === null) { broken = true; continue; }
      const x = across(steps[i]), y = down(values[i]);
      if (broken && !dots) pen.moveTo(x, y);
      else if (!dots) pen.lineTo(x, y);
      const alone = broken && (i + 1 === steps.length || values[i + 1] === null);
      broken = false;
      if (dots || alone) { pen.moveTo(x + 2.5, y); pen.arc(x, y, 2.5, 0, 7); }
    }
    if (dots) pen.fill();
    pen.stroke();
  }

  pointer(pen, curves, across) {
    if (state.hover === null) return;
    const x = across(state.hover);
    pen.strokeStyle = css("--pale");
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, HEIGHT - BOTTOM);
    pen.stroke();
    const said = curves.map(({ steps, values, dots, index }) => {
      const place = nearest(steps, state.hover);
      const whose = state.runs.length > 1 ? `${state.runs[index].title} ` : "";
      return `${whose}${dots ? "held-out " : ""}${figure(values[place])}`;
    });
    this.readout.textContent = `step ${Math.round(state.hover)}: ${said.join(" · ")}`;
  }
}

function nearest(steps, at) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle;
    else high = middle;
  }
  return at - steps[low] < steps[high] - at ? low : high;
}

let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; charts.forEach((chart) => chart.draw()); });
}

function show(begin, end) {
  state.begin = begin;
  state.end = end;
  $("whole").hidden = begin === null;
  update(true);
}

// ------------------------------------------------------------------------------- around

function header() {
  const [run] = state.runs;
  const many = state.runs.length > 1;
  document.title = `${many ? `${state.runs.length} runs` : run.title} · Surogate`;
  $("title").textContent = many ? `${state.runs.length} runs` : run.title;
  const eta = run.over ? "" : ` · ${duration((run.steps - run.step) * run.latest.seconds)} to go`;
  const task = run.task ? ` · ${run.task.task} ${run.task.done}${run.task.total ? `/${run.task.total}` : ""}` : "";
  $("outcome").textContent = `${run.outcome} · step ${run.step} of ${run.steps ?? "?"}${run.steps ? eta : ""}${task}`;
  $("progress").value = run.steps ? run.step / run.steps : 0;
  $("progress").hidden = many;
  const latest = run.latest, gpu = (name) => run.curves[`gpu.${name}`][1].at(-1);
  const tiles = [
    ["loss", figure(latest.loss)], ["held-out loss", figure(run.curves.eval[1].at(-1))],
    ["learning rate", figure(latest.lr)], ["gradient norm", figure(latest.grad_norm)],
    ["tokens/s", figure(latest.tokens_per_second)], ["tokens", figure(latest.total_tokens)],
    ["memory", `${figure(latest.peak_memory_bytes / 2 ** 30)} GiB`], ["phase", run.phase ?? "–"],
    ["speed of light", latest.speed_of_light == null ? "–" : `${figure(latest.speed_of_light * 100)} %`],
    ["GPU", gpu("utilization") == null ? "–" : `${figure(gpu("utilization"))} % · ${figure(gpu("power_watts"))} W`],
  ];
  $("latest").replaceChildren(...(many ? [] : tiles).map(([name, value]) => make("div", null, make("dt", name), make("dd", value))));
}

function legend() {
  const names = state.runs.map((run) => run.title).join("\n");
  if (state.runs.length < 2 || $("runs").dataset.names === names) return;
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
    const patch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of [["width", "100%"], ["height", "100%"], ["rx", "3"], ["fill", color(index)]])
      square.setAttribute(name, value);
    patch.append(square);
    return make("li", null, make("label", null, box, patch, make("span", run.title)));
  }));
}

function table(head, rows) {
  if (!rows.length) return make("p", "none");
  const line = (tag, cells) => make("tr", null, ...cells.map((cell) => make(tag, cell)));
  return make("table", null, ...(head.length ? [line("th", head)] : []), ...rows.map((cells) => line("td", cells)));
}

let told = "";
function details() {
  const now = JSON.stringify([state.runs.map((run) => [run.title, run.advice, run.notes, run.summary, run.outcome]), state.revision]);
  if (now === told) return;
  told = now;
  const open = new Set([...document.querySelectorAll("details[open]")].map((element) => element.dataset.run));
  $("details").replaceChildren(...state.runs.flatMap((run, index) => {
    const text = state.texts[index] ?? { config: "", data: [], plugins: [] };
    const config = make("details", null, make("summary", "config.yaml"), make("pre", text.config));
    config.dataset.run = run.title;
    config.open = open.has(run.title);
    const parts = [
      make("h2", "Advice"),
      table(["step", "seen", "key", "change"], run.advice.map((a) => [a.step, a.message, a.key, a.suggestion])),
      make("h2", "Summary"), table([], run.summary),
      ...(run.notes.length ? [make("h2", "Notes"), make("ul", null, ...run.notes.map((note) => make("li", note)))] : []),
      make("h2", "Data"), table([], text.data),
      make("h2", "Plugins"), table(["plugin", "distribution", "version"], text.plugins),
      make("h2", "Configuration"), config,
    ];
    return state.runs.length > 1 ? [make("h1", run.title), ...parts] : parts;
  }));
}

// ------------------------------------------------------------------------------- update

let busy = false;
async function update(again = false) {
  if (busy) return again && setTimeout(() => update(true), 50);
  busy = true;
  const query = state.begin === null ? {} : { begin: state.begin, end: state.end };
  try {
    const reply = await get("/figures", query);
    state.runs = reply.runs;
    const revision = JSON.stringify(reply.runs.map((run) => run.revision));
    if (revision !== state.revision) {
      state.texts = (await get("/texts")).runs;
      state.revision = revision;
    }
    header();
    legend();
    details();
    charts.forEach((chart) => chart.draw());
    document.body.dataset.drawn = "true";
    if (performance.getEntriesByName("curves").length === 0 && state.runs.some((run) => run.step)) performance.mark("curves");
  } catch (error) {
    $("outcome").textContent = `no longer served: ${error.message}`;
  } finally {
    busy = false;
  }
}

for (const curve of LAYOUT.curves) charts.push(new Chart(curve));
$("curves").append(...charts.map((chart) => chart.figure));
$("keys").textContent = "Shaded: green converging, yellow plateau, red diverging, violet unstable. Dashed: advice.";
$("smooth").addEventListener("input", (e) => { state.smooth = Number(e.target.value); drawSoon(); });
$("whole").addEventListener("click", () => show(null, null));
addEventListener("resize", drawSoon);
update();
setInterval(() => { if (!document.hidden && !state.runs.every((run) => run.over)) update(); }, EVERY);
