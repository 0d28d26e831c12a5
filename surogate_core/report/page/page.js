// All text reaches the page through textContent and the canvas: nothing of a run is ever read as HTML.

const LAYOUT = JSON.parse(document.getElementById("layout").textContent);
const TOKEN = new URLSearchParams(location.search).get("token");
const EVERY = 2000; // milliseconds between two requests while a run goes on
const SELDOM = 5; // every fifth of them when all runs are over
const TAP = 10, DOUBLE_TAP = 350; // pixels that a tap may move, milliseconds between two taps
const HEIGHT = 210, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22, LOG_RATIO = 200;
const ALWAYS = ["loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_bytes"];
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

const color = (index) => LAYOUT.colours[index % LAYOUT.colours.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const over = () => state.runs.length > 0 && state.runs.every((run) => run.over);
const shownRuns = () => state.runs.filter((run) => !state.hidden.has(run.title));

// ------------------------------------------------------------------------------- charts

class Chart {
  constructor({ title, series, unit, zero }) {
    this.series = series;
    this.zero = zero;
    this.canvas = make("canvas");
    this.title = make("b", unit ? `${title} (${unit})` : title);
    this.readout = make("span");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title);
    this.figure = make("figure", null, make("figcaption", null, this.title, this.readout), this.canvas);
    this.plain = this.title.textContent;
    this.drag = null; // the step at which a drag began
    this.pinch = null; // the steps under two fingers
    this.fingers = new Map(); // pointer → its place as a share of the width
    this.tap = { time: 0, x: 0, begun: 0 };
    const on = (name, listener) => this.canvas.addEventListener(name, listener);
    on("pointerdown", (e) => this.press(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.release(e, true));
    on("pointercancel", (e) => this.release(e, false));
    on("pointerleave", (e) => { if (e.pointerType === "mouse") { state.hover = null; drawSoon(); } });
    on("dblclick", () => show(null, null));
  }

  shareAt(event) {
    return Math.min(1, Math.max(0, (event.offsetX - LEFT) / (this.scale.width - LEFT - RIGHT)));
  }

  stepAt(event) {
    return this.scale ? this.scale.low + this.shareAt(event) * (this.scale.high - this.scale.low) : null;
  }

  press(event) {
    if (!this.scale || event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, this.shareAt(event));
    state.hover = this.stepAt(event);
    if (this.fingers.size === 1) {
      this.drag = state.hover;
      this.tap.begun = event.offsetX;
    } else {
      this.drag = state.hover = null;
      const { low, high } = this.scale;
      this.pinch = [...this.fingers.values()].slice(0, 2).map((share) => low + share * (high - low));
    }
    drawSoon();
  }

  move(event) {
    if (this.fingers.has(event.pointerId) && this.scale) this.fingers.set(event.pointerId, this.shareAt(event));
    if (this.pinch) {
      const shown = shownRuns().map((run) => run.range);
      const whole = [Math.min(...shown.map((r) => r[0])), Math.max(...shown.map((r) => r[1]))];
      [state.begin, state.end] = pinched(this.pinch, [...this.fingers.values()], whole) ?? [null, null];
    } else state.hover = this.stepAt(event);
    drawSoon();
  }

  release(event, meant) {
    if (!this.fingers.delete(event.pointerId)) return;
    const from = this.drag, to = this.stepAt(event);
    this.drag = null;
    if (this.pinch) {
      if (this.fingers.size > 1) return;
      this.pinch = null;
      if (state.begin === null) show(null, null);
      else show(Math.floor(state.begin), Math.ceil(state.end));
    } else if (meant && event.pointerType !== "mouse" && Math.abs(event.offsetX - this.tap.begun) < TAP) this.tapped(event);
    else if (meant && from !== null && to !== null && Math.abs(to - from) >= 2)
      show(Math.floor(Math.min(from, to)), Math.ceil(Math.max(from, to)));
    drawSoon();
  }

  tapped(event) {
    const again = event.timeStamp - this.tap.time < DOUBLE_TAP && Math.abs(event.offsetX - this.tap.x) < 4 * TAP;
    this.tap = { ...this.tap, time: again ? 0 : event.timeStamp, x: event.offsetX };
    if (again) show(null, null);
  }

  curves() {
    const found = [];
    state.runs.forEach((run, index) => {
      if (state.hidden.has(run.title)) return;
      const name = state.runs.length > 1 ? run.title : "";
      const [steps, values, means] = run.curves[this.series];
      found.push({ name, index, steps, values, means, dots: false });
      if (this.series === "loss" && run.curves.eval[0].length) {
        const [at, losses] = run.curves.eval;
        found.push({ name, index, steps: at, values: losses, means: null, dots: true });
      }
    });
    return found.filter((c) => c.values.some((v) => v !== null));
  }

  draw() {
    const runs = state.runs, expected = ALWAYS.includes(this.series) && runs.some((run) => run.step || !run.over);
    this.figure.hidden = !expected && !runs.some((run) => run.recorded.includes(this.series));
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
    const curves = this.curves(), [low, high] = this.stretch(curves);
    const heights = curves.flatMap((c) => c.values.filter((v, i) => v !== null && c.steps[i] >= low && c.steps[i] <= high));
    if (!curves.length) return this.nothing(pen, "nothing recorded");
    this.scale = { low, high, width };
    if (!heights.length) return this.nothing(pen, "nothing recorded in this part");
    let least = heights.reduce((a, b) => Math.min(a, b)), most = heights.reduce((a, b) => Math.max(a, b));
    if (this.zero) least = Math.min(least, 0);
    const log = least > 0 && most / least > LOG_RATIO;
    if (log) [least, most] = [Math.log10(least), Math.log10(most)];
    const margin = 0.05 * (most - least) || 0.05 * Math.abs(most) || 1;
    const bottom = log || least < 0 ? least - margin : Math.max(0, least - margin), top = most + margin;
    const across = (x) => LEFT + ((x - low) / (high - low)) * (width - LEFT - RIGHT);
    const down = (y) => HEIGHT - BOTTOM - (((log ? Math.log10(y) : y) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    this.caption(curves, log);
    this.background(pen, width, across);
    this.axes(pen, width, across, { low, high, bottom, top, log });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 4);
    pen.clip();
    for (const { means, ...curve } of curves) {
      // The raw values stay, pale, behind their mean.
      this.line(pen, curve, across, down, means ? 0.25 : 1);
      if (means) this.line(pen, { ...curve, values: means }, across, down, 1);
    }
    pen.restore();
    this.pointer(pen, curves, across);
  }

  nothing(pen, text) {
    this.caption([], false);
    pen.fillStyle = css("--pale");
    pen.fillText(text, LEFT, HEIGHT / 2);
  }

  caption(curves, log) {
    const text = `${this.plain}${log ? ", log scale" : ""}${curves.some((c) => c.dots) ? ", dots: held-out" : ""}`;
    if (this.title.textContent !== text) this.title.textContent = text;
  }

  stretch(curves) {
    const firsts = curves.map((c) => c.steps[0]), lasts = curves.map((c) => c.steps[c.steps.length - 1]);
    let low = state.begin ?? Math.min(...firsts), high = state.end ?? Math.max(...lasts);
    if (low >= high) [low, high] = [low - 1, low + 1];
    return [low, high];
  }

  background(pen, width, across) {
    const shown = shownRuns();
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
    for (const step of ticks(low, high, width < 400 ? 3 : 5)) pen.fillText(figure(step), across(step), HEIGHT - 6);
    pen.textAlign = "left";
  }

  line(pen, { steps, values, index, dots }, across, down, strength) {
    pen.strokeStyle = pen.fillStyle = color(index);
    pen.globalAlpha = strength;
    pen.lineWidth = 1.5;
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
    pen.globalAlpha = 1;
  }

  pointer(pen, curves, across) {
    if (state.hover === null) return;
    const x = across(state.hover);
    if (this.drag !== null) {
      pen.globalAlpha = 0.15;
      pen.fillStyle = css("--ink");
      pen.fillRect(across(this.drag), TOP, x - across(this.drag), HEIGHT - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = css("--pale");
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, HEIGHT - BOTTOM);
    pen.stroke();
    this.readout.textContent = readout(curves, state.hover);
  }
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
  $("outcome").textContent = outcome(state.runs);
  $("progress").value = run.steps ? run.step / run.steps : 0;
  $("progress").hidden = many || (run.over && !run.step);
  $("tools").hidden = state.runs.every((run) => run.over && !run.recorded.length);
  $("latest").replaceChildren(...(many ? [] : tiles(run)).map(([name, value]) => make("div", null, make("dt", name), make("dd", value))));
  const phases = Object.entries(LAYOUT.phases).filter(([label]) => !many && run.bands.some((band) => band[2] === label));
  $("keys").replaceChildren(...phases.map(([label, fill]) => make("span", null, swatch(fill, 0.5), label)),
    ...(!many && run.advice.length ? [make("span", "dashed: advice")] : []));
}

function swatch(fill, opacity) {
  const patch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", "100%"], ["height", "100%"], ["rx", "3"], ["fill", fill], ["opacity", opacity]])
    square.setAttribute(name, value);
  patch.append(square);
  return patch;
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
    return make("li", null, make("label", null, box, swatch(color(index), 1), make("span", run.title)));
  }));
}

// Without a head the rows are facts, (what, value), and their text is broken where it must be.
function table(head, rows) {
  if (!rows.length) return make("p", "none");
  const line = (tag, name, cells) => {
    const found = make("tr", null, ...cells.map((cell) => make(tag, cell)));
    if (head.length) found.className = name;
    [...found.cells].forEach((cell, place) => { if (head.length) cell.dataset.head = head[place]; });
    return found;
  };
  const lines = rows.map((cells) => line("td", "row", cells));
  const found = make("table", null, ...(head.length ? [line("th", "head", head)] : []), ...lines);
  if (!head.length) found.className = "facts";
  return found;
}

const PLUGINS = ["plugin", "distribution", "version"];
let last = "";
function details() {
  const now = JSON.stringify([state.runs.map((run) => [run.title, run.advice, run.notes, run.summary, run.outcome]), state.revision]);
  if (now === last) return;
  last = now;
  const open = new Set([...document.querySelectorAll("details[open]")].map((element) => element.dataset.run));
  const many = state.runs.length > 1;
  const alike = new Set(state.texts.map((text) => JSON.stringify(text.plugins))).size < 2;
  $("compared").replaceChildren(...(many ? [table(state.compared.head, state.compared.rows)] : []));
  const parts = state.runs.flatMap((run, index) => {
    const text = state.texts[index] ?? { config: "", data: [], plugins: [] };
    const config = make("details", null, make("summary", "config.yaml"), make("pre", text.config));
    config.dataset.run = run.title;
    config.open = open.has(run.title);
    return [
      ...(many ? [make("h1", run.title)] : []),
      make("h2", "Advice"),
      table(["step", "seen", "key", "change"], run.advice.map((a) => [a.step, a.message, a.key, a.suggestion])),
      make("h2", "Summary"), table([], run.summary),
      ...(run.notes.length ? [make("h2", "Notes"), make("ul", null, ...run.notes.map((note) => make("li", note)))] : []),
      make("h2", "Data"), table([], text.data),
      ...(many && alike ? [] : [make("h2", "Plugins"), table(PLUGINS, text.plugins)]),
      make("h2", "Configuration"), config,
    ];
  });
  if (many && alike) parts.push(make("h1", "Plugins of all runs"), table(PLUGINS, state.texts[0]?.plugins ?? []));
  $("details").replaceChildren(...parts);
}

// ------------------------------------------------------------------------------- update

let busy = false, wanted = false;
async function update(again = false) {
  if (busy) {
    wanted ||= again;
    return;
  }
  busy = true;
  const query = { smooth: state.smooth, ...(state.begin === null ? {} : { begin: state.begin, end: state.end }) };
  try {
    const reply = await get("/figures", query);
    state.runs = reply.runs;
    state.compared = reply.compared;
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
    // The server of a run ends with it; what its end was stays.
    if (!over()) $("outcome").textContent = `no longer served: ${error.message}`;
  } finally {
    busy = false;
    if (wanted) {
      wanted = false;
      update();
    }
  }
}

for (const curve of LAYOUT.curves) charts.push(new Chart(curve));
$("curves").append(...charts.map((chart) => chart.figure));
$("smooth").addEventListener("input", (e) => { state.smooth = Number(e.target.value); update(true); });
$("whole").addEventListener("click", () => show(null, null));
addEventListener("resize", drawSoon);
update();
let turn = 0;
// A run that is over may be resumed, so the page goes on to ask, at longer intervals.
setInterval(() => { if (!document.hidden && (!over() || ++turn % SELDOM === 0)) update(); }, EVERY);
