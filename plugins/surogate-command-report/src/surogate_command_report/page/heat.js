// Heat maps of the experts' loads: layers, and the experts of one layer, over the steps.

const heat = { data: null, layer: null, maps: [] };

// The load, relative to the mean of its layer, that a byte stands for; see Loads.data.
const loadOf = (byte, span) => (byte === 0 ? 0 : 2 ** (((byte - 128) / 127) * span));

class HeatMap {
  constructor(title, what, extra = []) {
    Object.assign(this, { what, cells: null, at: null });
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", title);
    this.canvas.className = "heat";
    this.canvas.tabIndex = 0;
    this.readout = make("span");
    this.key = make("ul");
    this.key.className = "key";
    const caption = make("figcaption", null, make("b", `${title} (${what} by step)`), this.readout);
    this.figure = make("figure", null, caption, this.key, ...extra, this.canvas);
    const on = (name, listener) => this.canvas.addEventListener(name, listener);
    on("pointermove", (e) => this.point(this.cellAt(e)));
    on("pointerdown", (e) => { this.point(this.cellAt(e)); this.chosen?.(this.at); });
    on("pointerleave", () => this.point(null));
    on("blur", () => { this.readout.removeAttribute("aria-live"); this.point(null); });
    on("keydown", (e) => this.type(e));
  }

  // `cells`: rows × columns bytes; `names`: of the rows; `rising`: colours from the least byte to the largest, not
  // around the mean; `tall`: pixels from the first row to the last.
  show(cells, names, { bounds, span, rising, tall }) {
    Object.assign(this, { cells, names, bounds, span, tall });
    this.range = rising ? [cells.reduce((a, b) => Math.min(a, b)), cells.reduce((a, b) => Math.max(a, b))] : null;
    this.explain();
    this.draw();
  }

  // The colour of a byte: [name in the layout, opacity].
  shade(byte) {
    if (this.range) return ["high", 0.1 + (0.9 * (byte - this.range[0])) / Math.max(1, this.range[1] - this.range[0])];
    if (byte === 0) return ["none", 1];
    return [byte < 128 ? "low" : "high", Math.min(1, (Math.abs(byte - 128) / 127) * (this.span / LAYOUT.heat.span))];
  }

  explain() {
    const { span } = LAYOUT.heat, most = 2 ** span, said = (byte) => `${Number(loadOf(byte, this.span).toPrecision(2))} ×`;
    const [least, largest] = this.range ?? [], middle = Math.round((least + largest) / 2);
    const shades = this.range
      ? [...new Set([least, middle, largest])].map((byte) => [said(byte), ...this.shade(byte)])
      : [[`1/${most} of the mean or less`, "low", 1], ["half", "low", 1 / span], ["2 ×", "high", 1 / span],
          [`${most} × or more`, "high", 1], ["no token", "none", 1]];
    this.key.replaceChildren(...shades.map(([name, colour, opacity]) => {
      const sample = shadeSample(LAYOUT.heat[colour]);
      sample.firstChild.setAttribute("opacity", opacity);
      return make("li", null, sample, name);
    }));
  }

  cellAt(event) {
    if (!this.scale) return null;
    const { edges } = this.scale, row = Math.floor(((event.offsetY - TOP) / this.tall) * this.names.length);
    const column = edges.findIndex(([from, to]) => event.offsetX >= from && event.offsetX < to);
    return column < 0 || row < 0 || row >= this.names.length ? null : { row, column };
  }

  type(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Enter" && this.at) this.chosen?.(this.at);
    if (!(event.key in moves) || !this.cells) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite");
    const from = this.at ?? { row: 0, column: this.bounds.length - 1 }, [down, across] = this.at ? moves[event.key] : [0, 0];
    const within = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.point({ row: within(from.row + down, this.names.length), column: within(from.column + across, this.bounds.length) });
  }

  point(at) {
    this.at = at;
    this.draw();
  }

  // What a cell says.
  text({ row, column }) {
    const [first, last] = this.bounds[column], steps = first === last ? `step ${last}` : `steps ${first} to ${last}`;
    const load = loadOf(this.cells[row * this.bounds.length + column], this.span);
    const said = load === 0 ? "no token" : `${Number(load.toPrecision(2))} × the mean`;
    return `${steps}, ${this.what} ${this.names[row]}: ${said}`;
  }

  draw() {
    if (!this.cells || this.figure.hidden) return;
    const width = this.canvas.clientWidth || 440, { tall } = this, height = TOP + tall + BOTTOM, ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d"), [run] = state.runs, rows = this.names.length, count = this.bounds.length;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    const ends = this.bounds.map(([first, last]) => [along(run.axes, state.axis, first - 1), along(run.axes, state.axis, last)]);
    const low = state.begin ?? ends[0][0], high = Math.max(state.end ?? ends[count - 1][1], low + 1e-9);
    const across = (x) => LEFT + ((x - low) / (high - low)) * (width - LEFT - RIGHT);
    // Whole pixels, so that columns neither overlap nor leave gaps.
    const whole = (x) => Math.round(across(x) * ratio) / ratio, edges = ends.map(([from, to]) => [whole(from), whole(to)]);
    this.scale = { edges };
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width - LEFT - RIGHT, tall);
    pen.clip();
    pen.imageSmoothingEnabled = rows > tall;
    const picture = this.picture();
    edges.forEach(([from, to], column) => { if (to > from) pen.drawImage(picture, column, 0, 1, rows, from, TOP, to - from, tall); });
    pen.restore();
    this.frame(pen, { width, tall, low, high, across });
    this.readout.textContent = this.at ? this.text(this.at) : "";
  }

  // The cells as a picture of one pixel each.
  picture() {
    const rows = this.names.length, count = this.bounds.length, found = document.createElement("canvas");
    [found.width, found.height] = [count, rows];
    const pen = found.getContext("2d"), image = pen.createImageData(count, rows);
    const shades = Array.from({ length: 256 }, (_, byte) => {
      const [name, opacity] = this.shade(byte);
      return [...[1, 3, 5].map((i) => parseInt(LAYOUT.heat[name].slice(i, i + 2), 16)), Math.round(255 * opacity)];
    });
    const words = new Uint32Array(image.data.buffer);
    const packed = Uint32Array.from(shades, (shade) => new Uint32Array(Uint8ClampedArray.from(shade).buffer)[0]);
    for (let i = 0; i < rows * count; i++) words[i] = packed[this.cells[i]];
    pen.putImageData(image, 0, 0);
    return found;
  }

  frame(pen, { width, tall, low, high, across }) {
    const rows = this.names.length;
    pen.strokeStyle = css("--line");
    pen.strokeRect(LEFT, TOP, width - LEFT - RIGHT, tall);
    pen.fillStyle = css("--pale");
    pen.textAlign = "right";
    for (let row = 0; row < rows; row += Math.max(1, Math.ceil(rows / 8)))
      pen.fillText(this.names[row], LEFT - 6, TOP + ((row + 0.5) * tall) / rows + 4);
    const [unit, by] = axisUnit(state.axis, high), edge = width - RIGHT - pen.measureText(unit).width - 8;
    pen.fillText(unit, width - RIGHT, TOP + tall + BOTTOM - 7);
    pen.textAlign = "center";
    for (const place of ticks(low / by, high / by, width < 420 ? 3 : 5)) {
      const text = figure(place), x = across(place * by);
      if (x + pen.measureText(text).width / 2 < edge) pen.fillText(text, x, TOP + tall + BOTTOM - 7);
    }
    pen.textAlign = "left";
    if (!this.at) return;
    const [from, to] = this.scale.edges[this.at.column], size = tall / rows;
    pen.strokeStyle = css("--ink");
    pen.strokeRect(from, TOP + this.at.row * size, Math.max(2, to - from), Math.max(2, size));
  }
}

// Takes the data of the maps, or null; builds them when they come first.
function takeExperts(data) {
  if (!data) return;
  const raw = atob(data.cells), cells = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) cells[i] = raw.charCodeAt(i);
  heat.data = { ...data, cells };
  if (!heat.maps.length) {
    const choice = make("select"), layers = new HeatMap(LAYOUT.heat.layers, "layer");
    heat.choice = choice;
    const label = make("label", "Layer ", choice);
    label.className = "choice";
    const experts = new HeatMap(LAYOUT.heat.experts, "expert", [label]);
    heat.maps = [layers, experts];
    layers.chosen = (at) => { if (at) chooseLayer(at.row); };
    choice.addEventListener("change", () => chooseLayer(Number(choice.value)));
    $("curves").append(layers.figure, experts.figure);
  }
  const { layers } = heat.data;
  if (heat.choice.options.length !== layers.length)
    heat.choice.replaceChildren(...layers.map((layer, row) => Object.assign(make("option", layer), { value: row })));
  chooseLayer(heat.layer ?? leastEven());
}

const cellsOf = (row) => {
  const { cells, experts, bounds } = heat.data, size = experts * bounds.length;
  return cells.subarray(row * size, (row + 1) * size);
};

// For each column the largest byte of a layer: its imbalance.
function peaks(row) {
  const cells = cellsOf(row), { experts, bounds } = heat.data, found = new Uint8Array(bounds.length);
  for (let e = 0; e < experts; e++)
    for (let t = 0; t < bounds.length; t++) found[t] = Math.max(found[t], cells[e * bounds.length + t]);
  return found;
}

function leastEven() {
  const { layers, span } = heat.data;
  const means = layers.map((_, row) => peaks(row).reduce((sum, byte) => sum + loadOf(byte, span), 0));
  return means.indexOf(Math.max(...means));
}

function chooseLayer(row) {
  const { layers, experts, bounds, span } = heat.data, all = new Uint8Array(layers.length * bounds.length);
  heat.layer = row;
  heat.choice.value = row;
  layers.forEach((_, place) => all.set(peaks(place), place * bounds.length));
  const tall = Math.max(180, Math.min(3 * Math.max(layers.length, experts), 384)), rest = { bounds, span, tall };
  heat.maps[0].show(all, layers, { ...rest, rising: true });
  heat.maps[1].show(cellsOf(row), Array.from({ length: experts }, (_, e) => e), { ...rest, rising: false });
}
