// The live page: asks for the figures every two seconds and shows them.

const TOKEN = new URLSearchParams(location.search).get("token");
const EVERY = 2000; // milliseconds between two requests while a run goes on
const LOADS = 10000; // milliseconds between two requests for the loads of experts
const SELDOM = 5; // every fifth of them when all runs are over

const over = () => state.runs.length > 0 && state.runs.every((run) => run.over);

async function get(path, query = {}) {
  const reply = await fetch(`${path}?${new URLSearchParams({ ...query, token: TOKEN })}`);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

function named(element, name) {
  element.className = name;
  return element;
}

// Rebuilds what is shown when its contents have changed.
const shownTexts = new Map();
function renew(id, contents, build) {
  const text = JSON.stringify(contents);
  if (shownTexts.get(id) === text) return;
  shownTexts.set(id, text);
  const open = new Set([...$(id).querySelectorAll("details[open]")].map((element) => element.dataset.title));
  $(id).replaceChildren(...build());
  for (const element of $(id).querySelectorAll("details")) element.open = open.has(element.dataset.title);
}

function header(card) {
  document.title = `${card.title} · Surogate`;
  $("card").className = `card ${card.tone}`;
  renew("card", card, () => {
    const parts = [make("h1", card.title)];
    if (card.subtitle) parts.push(named(make("p", card.subtitle), "subtitle"));
    parts.push(named(make("p", card.verdict), "verdict"));
    if (card.progress !== null && card.progress < 1) {
      const bar = make("progress");
      Object.assign(bar, { max: 1, value: card.progress });
      bar.setAttribute("aria-label", "steps done");
      parts.push(bar);
    }
    const message = card.message ? [scrolled("message", card.message)] : [];
    if (card.tone !== "good") parts.push(...message);
    if (card.tiles.length) {
      parts.push(named(make("dl", null, ...card.tiles.map(([name, value, remark]) => make("div", null, make("dt", name),
        make("dd", value, ...(remark ? [" ", make("small", remark)] : []))))), "tiles"));
    }
    const places = [...card.places, ...card.commands];
    if (places.length) {
      parts.push(named(make("dl", null, ...places.map(([what, text]) =>
        make("div", null, make("dt", what), make("dd", null, make("code", text))))), "places"));
    }
    if (card.tone === "good") parts.push(...message);
    return parts;
  });
}

function scrolled(name, text) {
  const found = named(make("pre", text), name);
  found.tabIndex = 0;
  return found;
}

// Without a head the rows are facts, (what, value), and their text is broken where it must be.
function table(head, rows) {
  if (!head.length) {
    return named(make("table", null, ...rows.map(([what, ...cells]) => {
      const name = make("th", what);
      name.scope = "row";
      return make("tr", null, name, ...cells.map((cell) => make("td", cell)));
    })), "facts");
  }
  const heads = head.map((cell) => Object.assign(make("th", cell), { scope: "col" }));
  const lines = rows.map((cells) => named(make("tr", null, ...cells.map((cell, place) => {
    const found = make("td", cell);
    found.dataset.head = head[place];
    return found;
  })), "row"));
  const found = named(make("div", null, make("table", null, named(make("tr", null, ...heads), "head"), ...lines)), "wide");
  found.tabIndex = 0;
  return found;
}

function section({ title, header: head, rows, items, text, folded }, level, owner = "") {
  let body = text ? scrolled("", text) : null;
  if (items.length) body = make("ul", null, ...items.map((item) => make("li", item)));
  if (rows.length) body = table(head, rows);
  if (!folded) return make("section", null, make(`h${level}`, title), body);
  const found = make("details", null, make("summary", title), body);
  found.dataset.title = `${owner}\n${title}`;
  return found;
}

function details(texts) {
  renew("details", texts, () => [
    ...texts.runs.flatMap((sections, place) => {
      if (texts.runs.length === 1) return sections.map((one) => section(one, 2));
      const title = state.runs[place]?.title ?? "";
      const found = named(make("details", null, make("summary", title), ...sections.map((one) => section(one, 3, title))), "run");
      found.dataset.title = title;
      return [found];
    }),
    ...texts.shared.map((one) => section(one, 2)),
  ]);
}

// The maps of experts are large, so a run's growth is fetched seldom.
let loaded = "", loadedAt = 0;
async function experts() {
  const now = single() ? JSON.stringify(state.runs[0].loads) : "[]";
  if (now === "[]" || (now === loaded) || (loadedAt && !over() && Date.now() - loadedAt < LOADS)) {
    heat.maps.forEach((map) => map.draw());
    return;
  }
  [loaded, loadedAt] = [now, Date.now()];
  takeExperts((await get("/experts")).experts);
}

let busy = false, again = false, revision = "";
async function changed() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  const part = state.begin === null ? {} : { begin: state.begin, end: state.end };
  try {
    const reply = await get("/figures", { smooth: state.smooth, x: state.axis, ...part });
    state.runs = reply.runs;
    header(reply.card);
    renew("tables", reply.tables, () => reply.tables.map((one) => section(one, 2)));
    legend();
    $("tools").hidden = !state.runs.some((run) => run.recorded.length);
    arrange(reply.charts);
    charts.forEach((chart) => chart.draw());
    if (performance.getEntriesByName("curves").length === 0 && state.runs.some((run) => run.step)) performance.mark("curves");
    await experts();
    const now = JSON.stringify(state.runs.map((run) => run.revision));
    if (now !== revision) details(await get("/texts"));
    revision = now;
    document.body.dataset.drawn = "true";
  } catch (error) {
    // The server of a run ends with it; what its end was stays.
    if (!over()) document.querySelector(".verdict").textContent = `No longer served: ${error.message}`;
  } finally {
    busy = false;
    if (again) {
      again = false;
      changed();
    }
  }
}

begin();
changed();
let turn = 0;
// A run that is over may be resumed, so the page goes on to ask, at longer intervals.
setInterval(() => { if (!document.hidden && (!over() || ++turn % SELDOM === 0)) changed(); }, EVERY);
