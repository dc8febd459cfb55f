// The choice of the reader: one state for all views and for the address (#L3H5&tab=attention).
// `pin` is a head [layer, head] that stays next to the chosen head. `beside` is a head of the other
// model, or "same" for the head with the layer and the index of the chosen head.
const FIRST = { layer: page.selected[0], head: page.selected[1], view: $("all").querySelector("[role=tab]").dataset.tab,
  tab: page.prompt ? "attention" : $("one-tab-selectivity").dataset.tab, excerpt: 0, query: page.excerpts[0].tokens.length - 1, key: null, auto: true,
  against: null, distance: null, band: null, mode: "stop", factor: 0.5, by: "", pin: null, beside: page.beside ? "same" : null };
const state = { ...FIRST };

// ---- the address

function address() {
  const { layer, head, view, by, tab, excerpt, query, key, auto, band, pin, beside } = state;
  const named = (place) => Array.isArray(place) ? `L${place[0]}H${place[1]}` : place;
  const end = page.excerpts[excerpt].tokens.length - 1;
  const parts = [`L${layer}H${head}`, view !== FIRST.view && `view=${view}`, by && `by=${by}`, tab !== FIRST.tab && `tab=${tab}`,
    excerpt > 0 && `text=${excerpt + 1}`, key !== null ? `pair=${query}-${key}` : !auto && query !== end && `query=${query}`,
    band && `${band.mode}=${band.from}-${band.to}${band.mode === "scale" ? `x${state.factor}` : ""}`, pin && `pin=${named(pin)}`, beside && `beside=${named(beside)}`];
  return `#${parts.filter(Boolean).join("&")}`;
}

/** Writes the choice into the address. "back" undoes a `step`. */
function remember(step) {
  if (!document.documentElement.dataset.ready || address() === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", address());
}

/** Reads the choice from the address and ignores unknown names. An address that begins with a view
    or a tab keeps the chosen head. */
function recall() {
  const parts = location.hash.slice(1).split("&"), complete = !/^(view|tab)=/.test(parts[0]);
  const [name, ...rest] = complete ? parts : [`L${state.layer}H${state.head}`, ...parts];
  const headOf = (text) => /^L(\d+)H(\d+)$/.exec(text ?? "")?.slice(1).map(Number);
  const exists = (place, model = page) => place && model?.rows[place[0]]?.[place[1]] >= 0;
  const place = headOf(name);
  if (!exists(place)) return false;
  const given = Object.fromEntries(rest.map((text) => text.split("=", 2)));
  const pair = (text) => /^(\d+)-(\d+)$/.exec(text ?? "")?.slice(1).map(Number);
  const excerpt = page.excerpts[Number(given.text) - 1] ? Number(given.text) - 1 : 0;
  const length = page.excerpts[excerpt].tokens.length;
  const [query, key] = pair(given.pair) ?? [/^\d+$/.test(given.query ?? "") ? Number(given.query) : length - 1, null];
  const mode = ["stop", "drop", "scale"].find((name) => given[name] !== undefined) ?? "stop";
  const [planes, factor] = (given[mode] ?? "").split("x"), band = pair(planes);
  const pin = exists(headOf(given.pin)) ? headOf(given.pin) : null;
  const beside = given.beside === "same" && page.beside ? "same" : headOf(given.beside);
  Object.assign(state, { layer: place[0], head: place[1], excerpt, against: null, distance: null, mode, factor: factor >= 0 ? Number(factor) : FIRST.factor,
    view: $(`all-tab-${given.view}`) ? given.view : complete ? FIRST.view : state.view,
    by: [...$("map-by").options].some(({ value }) => value === given.by) ? given.by : "",
    tab: $(`one-tab-${given.tab}`) ? given.tab : complete ? FIRST.tab : state.tab,
    auto: given.query === undefined && key === null, query: query < length ? query : length - 1, key: key !== null && key <= query && query < length ? key : null,
    band: band && band[0] <= band[1] && band[1] < page.planes[place[0]] ? { from: band[0], to: band[1], mode } : null,
    pin, beside: !pin && (beside === "same" || exists(beside, page.beside)) ? beside : null });
  $("head").classList.add("open");
  return true;
}

// ---- the chosen head

function choose(layer, head) {
  if (!(page.rows[layer]?.[head] >= 0)) {
    [$("pick-layer").value, $("pick-head").value] = [state.layer, state.head];
    return;
  }
  $("head").classList.add("open");
  const many = page.planes[layer];
  Object.assign(state, { layer, head, distance: null, band: state.band && state.band.to < many ? state.band : null });
  remember(true);
  show();
}

let frames = 0;
/** Shows words at once, and figures once per frame, so that a held arrow key does not queue them. */
function show() {
  if (state.auto) state.query = firstQuery();
  describe(rowOf(state.layer, state.head));
  describeSecond();
  markRow(rowOf(state.layer, state.head));
  showTabs();
  listTokens();
  showBand();
  $("explore").setAttribute("aria-busy", "true");
  cancelAnimationFrame(frames);
  frames = requestAnimationFrame(refresh);
}

/** The visible panes of a figure with their heads. */
const panesOf = (name) => [[plot(name), { model: page, layer: state.layer, head: state.head }], [$(`pinned-${name}`), besideHead()]]
  .filter(([element, shown]) => element && shown && seen(element));

/** Draws or updates the visible figures. A later call stops an earlier one. */
let calls = 0;
async function refresh() {
  const call = ++calls;
  $("explore").setAttribute("aria-busy", "true");
  describeSecond();
  // Read all widths first, because the browser computes the layout again after each change.
  const inSight = Object.keys(page.figures).map((name) => [name, panesOf(name).map((pane) => [...pane, pane[0].clientWidth])]);
  for (const [name, all] of inSight) {
    const panes = [];
    for (const [element, shown, width] of all) {
      const { model, layer, head } = shown;
      if (drawnOf.get(element) !== model) await draw(name, element, model);
      else if (Math.abs(element._fullLayout.width - width) > 1) await Plotly.Plots.resize(element);
      element.dataset.head = nameOf(shown);
      if (call !== calls) return;
      SHOW[name]?.(element, layer, head, model);
      panes.push(element);
    }
    if (SCALED.includes(name)) await oneScale(panes);
  }
  for (const element of $("head").querySelectorAll(".plot")) {
    if (drawn(element)) explainIfEmpty(element);
  }
  if (seen($("tokens"))) showText();
  if (seen($("pair-words"))) describePair(state.query, keyOf(state.query));
  showList(true);
  if (printing) fitPaper();
  $("explore").setAttribute("aria-busy", "false");
  document.documentElement.dataset.shown = `L${state.layer}H${state.head}`;
}

function labelWords(row, model = page) {
  const [offset, low, high] = ["offset", "offset_low", "offset_high"].map((name) => number(name, row, model));
  const looks = !Number.isNaN(offset) ? `, offset ${offset}` : Number.isNaN(low) ? "" : `, offsets ${low} to ${high}`;
  const doubts = ["uncertain", "opposed"].filter((doubt) => model.doubts[doubt].includes(row)).map((doubt) => `, ${doubt}`);
  return `${model.labels[row]}${looks}${doubts.join("")}`;
}

function bitsWords(row, model = page) {
  const parts = shares(row, model);
  const split = ["sink", "position", "shared", "content", "both"].map((part, i) => `${part} ${Math.round(100 * (parts[i] || 0))}%`);
  if (Number.isNaN(parts[2])) split.splice(2, 1);  // not measured
  return `${number("total_bits", row, model).toFixed(2)} bits: ${split.join(", ")}`;
}

/** What the head follows when keys exchange contents; "" if this was not measured. */
function followWords(row, model = page) {
  if (!model.columns.follows_chance || ["sink", "diffuse", "untested"].includes(model.labels[row])) return "";
  const [stays, moves, chance] = ["position", "content", "chance"].map((name) => number(`follows_${name}`, row, model));
  if (!(stays >= 0)) return "";
  const [of, with_, by] = [stays, moves, chance].map((share) => `${Math.round(100 * share)}%`);
  return ` When keys exchange contents, ${of} of its attention on them stays at the same positions and ${with_} moves with the contents (chance ${by}).`;
}

/** The attribution of a head, on the page of a prompt. */
const effectWords = (row) => `Attribution ${nats(number("attribution", row), (size) => size.toFixed(3))}. `
  + `Attention on the previous token ${Math.round(100 * number("previous_token", row))}%, on sinks ${Math.round(100 * number("sink_mass", row))}%.`;

function describe(row) {
  const { layer, head } = state;
  const { cells } = rowAt(row);
  $("pick-layer").value = layer;
  $("pick-head").value = head;
  const glyph = cells[1].querySelector(".glyph").cloneNode(true);
  $("head-title").replaceChildren(...(page.prompt ? [`Layer ${layer}, head ${head}`] : [`Layer ${layer}, head ${head}: `, glyph, labelWords(row)]));
  const parts = shares(row);
  $("budget").querySelectorAll("span").forEach((bar, i) => { bar.style.flexGrow = parts[i] || 0; bar.hidden = !(parts[i] >= 0.005); });
  $("now").textContent = page.prompt ? effectWords(row) : `${bitsWords(row)}.${followWords(row)}`;
  document.querySelectorAll("#head .plot").forEach((element) => {
    element.setAttribute("aria-label", `${element.dataset.words ??= element.getAttribute("aria-label")}: layer ${layer}, head ${head}`);
  });
  document.querySelectorAll("#numbers [data-column]").forEach((cell) => {
    cell.textContent = cells[Number(cell.dataset.column) + 2].textContent;
  });
}

// ---- tabs, and a second head: a pinned head, or a head of the other model

/** The head in the second pane, or null. */
function besideHead() {
  const { pin, beside, layer, head } = state;
  if (pin) return { model: page, layer: pin[0], head: pin[1] };
  if (!beside) return null;
  const [l, h] = beside === "same" ? [layer, head] : beside;
  return page.beside.rows[l]?.[h] >= 0 ? { model: page.beside, layer: l, head: h } : null;
}

/** Name of a head, with its model if there are two. */
const nameOf = ({ model, layer, head }) => `${page.beside ? `${model.name}: ` : ""}L${layer} H${head}`;

/** Describes the head of the other model, and says which parts of the choice it lacks. */
function describeSecond() {
  if (!page.beside) return;
  const { beside, layer, head, band } = state, second = besideHead(), { name, rows, live } = page.beside;
  $("beside").value = Array.isArray(beside) ? beside.join() : beside ?? "";
  $("beside-now").hidden = !beside;
  if (!beside) return;
  if (!second) {
    $("beside-now").textContent = `${name} has no layer ${layer}, head ${head}.`;
    return;
  }
  const row = rows[second.layer][second.head], planes = bandOf(second.layer, page.beside);
  const stopped = !band ? "" : !live[second.layer][second.head] ? " The planes of this head cannot be stopped here."
    : planes ? ` ${bandWords(planes, second.layer, page.beside)}` : " This head has no plane of these wavelengths.";
  const text = excerptOf(page.beside) < 0 && (["attention", "pair"].includes(state.tab) || (state.tab === "kernel" && planes))
    ? " This model did not read this piece of text: use the same --prompt for both models."
    : state.tab === "pair" && !sameTokens(page.beside) ? " This model has other tokens for this text." : "";
  $("beside-now").textContent = `${name}, layer ${second.layer}, head ${second.head}: ${labelWords(row, page.beside)}. `
    + `${bitsWords(row, page.beside)}.${followWords(row, page.beside)}${stopped}${text}`;
}

const PANES = { all: ["view", $("all")], one: ["tab", $("head")] };
function showTabs() {
  for (const [prefix, [key, pane]] of Object.entries(PANES)) {
    for (const tab of pane.querySelectorAll("[role=tab]")) {
      const chosen = tab.dataset.tab === state[key];
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      $(`${prefix}-${tab.dataset.tab}`).hidden = !chosen;
    }
  }
  const { pin } = state, beside = besideHead();
  $("head").classList.toggle("pinned", Boolean(beside) && !(state.tab === "attention" && excerptOf(beside.model) < 0)
    && !(state.tab === "pair" && !sameTokens(beside.model)));
  $("pin").setAttribute("aria-pressed", Boolean(pin));
  $("pin").textContent = pin ? `Unpin L${pin[0]} H${pin[1]}` : "Pin";
  $("live").hidden = ["numbers", "stopped", "reach"].includes(state.tab);
}
for (const [key, pane] of Object.values(PANES)) {
  const tabs = [...pane.querySelectorAll("[role=tab]")];
  const open = (tab) => { state[key] = tab.dataset.tab; showTabs(); remember(false); refresh(); tab.focus(); };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(tabs.at(to % tabs.length));
    });
  });
}
function setBeside(change) {
  Object.assign(state, change);
  remember(true);
  showTabs();
  refresh();
}
$("pin").addEventListener("click", () => setBeside({ pin: state.pin ? null : [state.layer, state.head], beside: null }));
if (page.beside) {
  $("beside").append(option("", "none"), option("same", "same head"), ...page.beside.rows.map((row, layer) => {
    const group = Object.assign(document.createElement("optgroup"), { label: `Layer ${layer}` });
    group.append(...row.flatMap((index, head) => index < 0 ? [] : [option(`${layer},${head}`, `L${layer} H${head} ${page.beside.labels[index]}`)]));
    return group;
  }));
  $("beside").addEventListener("change", ({ target: { value } }) =>
    setBeside({ pin: null, beside: value.includes(",") ? value.split(",").map(Number) : value || null }));
}

// ---- other ways to choose

function step(by) {
  const row = rowOf(state.layer, state.head) + by;
  choose(...places[(row + places.length) % places.length]);
}
const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
plot("map").addEventListener("keydown", (event) => {
  if (!steps[event.key]) return;
  event.preventDefault();
  const [down, right] = steps[event.key];
  choose(state.layer + down, state.head + right);
});
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
for (const id of ["pick-layer", "pick-head"]) {
  $(id).addEventListener("change", () => choose(Number($("pick-layer").value), Number($("pick-head").value)));
}
$("map-by").addEventListener("change", ({ target: { value } }) => {
  state.by = value;
  remember(false);
  colorMap();
});
$("close").addEventListener("click", () => $("head").classList.remove("open"));

async function start() {
  await unpackPlotly();
  for (const name of Object.keys(page.figures)) {
    if ($("explore").contains(plot(name))) continue;
    size(name, plot(name));
    far.add(plot(name));
    nearing.observe(plot(name));
  }
  addEventListener("beforeprint", () => {
    showList(false);
    comeNear([...far]);
  });
  dark.addEventListener("change", () => document.querySelectorAll(".plot").forEach((element) =>
    drawn(element) && Plotly.relayout(element, { template: theme() })));
  recall();
  show();
  for (const event of ["hashchange", "popstate"]) addEventListener(event, () => {
    if (!location.hash) {
      Object.assign(state, FIRST);
      $("head").classList.remove("open");
    }
    if (!location.hash || recall()) show();
  });
  document.documentElement.dataset.ready = "true";
}
start();
