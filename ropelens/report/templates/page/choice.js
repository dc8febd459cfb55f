// What is chosen: one state, the same in all views and in the address (#L3H5&tab=attention).
const state = { layer: 0, head: 0, view: "", tab: "", excerpt: 0, query: 0, key: null, distance: null,
  band: null, mode: "stop", norms: "mean", pin: null };
const FIRST = { view: $("all").querySelector("[role=tab]").dataset.tab, tab: $("one-tab-selectivity").dataset.tab };
Object.assign(state, FIRST);
document.documentElement.classList.add("scripted");

// ---- the address

function address() {
  const { layer, head, view, tab, excerpt, query, key, band, pin } = state;
  const end = page.excerpts[excerpt].tokens.length - 1;
  const parts = [`L${layer}H${head}`, view !== FIRST.view && `view=${view}`, tab !== FIRST.tab && `tab=${tab}`,
    excerpt > 0 && `text=${excerpt + 1}`, key !== null ? `pair=${query}-${key}` : query !== end && `query=${query}`,
    band && `${band.mode}=${band.from}-${band.to}`, pin && `pin=L${pin[0]}H${pin[1]}`];
  return `#${parts.filter(Boolean).join("&")}`;
}

/** Write the choice into the address; a `step` is one that "back" returns from. */
function remember(step) {
  if (!document.documentElement.dataset.ready || address() === location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", address());
}

/** The choice that an address names; what names no head, or nothing that there is, is left alone. */
function recall() {
  const [name, ...rest] = location.hash.slice(1).split("&");
  const headOf = (text) => /^L(\d+)H(\d+)$/.exec(text ?? "")?.slice(1).map(Number);
  const there = (place) => place && page.rows[place[0]]?.[place[1]] >= 0;
  const place = headOf(name);
  if (!there(place)) return false;
  const given = Object.fromEntries(rest.map((text) => text.split("=", 2)));
  const pair = (text) => /^(\d+)-(\d+)$/.exec(text ?? "")?.slice(1).map(Number);
  const excerpt = page.excerpts[Number(given.text) - 1] ? Number(given.text) - 1 : 0;
  const length = page.excerpts[excerpt].tokens.length;
  const [query, key] = pair(given.pair) ?? [/^\d+$/.test(given.query ?? "") ? Number(given.query) : length - 1, null];
  const band = pair(given.stop ?? given.drop), mode = given.drop ? "drop" : "stop";
  const pin = headOf(given.pin);
  Object.assign(state, { layer: place[0], head: place[1], excerpt, distance: null, mode,
    view: $(`all-tab-${given.view}`) ? given.view : FIRST.view,
    tab: $(`one-tab-${given.tab}`) ? given.tab : FIRST.tab,
    query: query < length ? query : length - 1, key: key !== null && key <= query && query < length ? key : null,
    band: band && band[0] <= band[1] && band[1] < page.planes[place[0]] ? { from: band[0], to: band[1], mode } : null,
    pin: there(pin) ? pin : null });
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
/** Words at once; figures once a frame, so that a held arrow key does not queue them up. */
function show() {
  describe(rowOf(state.layer, state.head));
  markRow(rowOf(state.layer, state.head));
  showTabs();
  listTokens();
  showBand();
  $("explore").setAttribute("aria-busy", "true");
  cancelAnimationFrame(frames);
  frames = requestAnimationFrame(refresh);
}

/** The figures in sight, drawn where they are not yet; the last call wins. */
let turn = 0;
async function refresh() {
  const mine = ++turn;
  $("explore").setAttribute("aria-busy", "true");
  for (const [name, showOne] of Object.entries(SHOW)) {
    if (!page.figures[name]) continue;
    for (const [element, layer, head] of [[plot(name), state.layer, state.head], [$(`pinned-${name}`), ...(state.pin ?? [])]]) {
      if (!element || !seen(element)) continue;
      if (!drawn(element)) await draw(name, element);
      else if (Math.abs(element._fullLayout.width - element.clientWidth) > 1) await Plotly.Plots.resize(element);
      element.dataset.head = `L${layer} H${head}`;
      if (mine !== turn) return;
      showOne(element, layer, head);
    }
  }
  if (seen($("tokens"))) showText();
  if (seen($("pair-words"))) tellPair(state.query, keyOf(state.query));
  showList(true);
  $("explore").setAttribute("aria-busy", "false");
  document.documentElement.dataset.shown = `L${state.layer}H${state.head}`;
}

function describe(row) {
  const { layer, head } = state;
  const label = page.labels[row];
  const cells = tableRows[row].cells;
  const [offset, low, high] = ["offset", "offset_low", "offset_high"].map((name) => number(name, row));
  const looks = !Number.isNaN(offset) ? `, offset ${offset}`
    : Number.isNaN(low) ? "" : `, offsets ${low} to ${high}`;
  $("pick-layer").value = layer;
  $("pick-head").value = head;
  const glyph = cells[1].querySelector(".glyph").cloneNode(true);
  $("head-title").replaceChildren(`Layer ${layer}, head ${head}: `, glyph, `${label}${looks}`);
  const parts = shares(row);
  const names = ["sink", "position", "content", "both at once"];
  $("budget").querySelectorAll("span").forEach((bar, i) => { bar.style.flexGrow = parts[i] || 0; bar.hidden = !(parts[i] >= 0.005); });
  const split = names.map((part, i) => `${part} ${Math.round(100 * (parts[i] || 0))}%`).join(", ");
  $("now").textContent = `${number("total_bits", row).toFixed(2)} bits: ${split}`;
  document.querySelectorAll("#head .plot").forEach((element) => {
    element.setAttribute("aria-label", `${element.dataset.words ??= element.getAttribute("aria-label")}: layer ${layer}, head ${head}`);
  });
  document.querySelectorAll("#numbers [data-column]").forEach((cell) => {
    cell.textContent = cells[Number(cell.dataset.column) + 2].textContent;
  });
}

// ---- tabs, and a pinned head beside the chosen one

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
  const { pin } = state;
  $("head").classList.toggle("pinned", Boolean(pin));
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
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) open(tabs[(i + by + tabs.length) % tabs.length]);
    });
  });
}
for (const name of ["selectivity", "attention", "kernel"]) {
  const beside = Object.assign(document.createElement("div"), { id: `pinned-${name}`, className: "plot beside" });
  beside.setAttribute("role", "group");
  beside.setAttribute("aria-label", "The pinned head");
  plot(name).after(beside);
}
$("pin").addEventListener("click", () => {
  state.pin = state.pin ? null : [state.layer, state.head];
  remember(true);
  showTabs();
  document.querySelectorAll("#head .plot").forEach((element) => drawn(element) && seen(element) && Plotly.Plots.resize(element));
  refresh();
});

// ---- other ways to choose

function step(by) {
  const row = rowOf(state.layer, state.head) + by;
  choose(...places[(row + places.length) % places.length]);
}
const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
plot("map").addEventListener("keydown", (event) => {
  const move = steps[event.key];
  if (!move) return;
  event.preventDefault();
  choose(state.layer + move[0], state.head + move[1]);
});
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
for (const id of ["pick-layer", "pick-head"]) {
  $(id).addEventListener("change", () => choose(Number($("pick-layer").value), Number($("pick-head").value)));
}
$("map-by").addEventListener("change", colorMap);
document.querySelectorAll("[name=norms]").forEach((radio) => {
  radio.addEventListener("change", () => { state.norms = radio.value; showNorms(plot("norms")); });
});
$("close").addEventListener("click", () => $("head").classList.remove("open"));

async function start() {
  await unpackPlotly();
  for (const name of Object.keys(page.figures)) if (!SHOW[name]) await draw(name);
  dark.addEventListener("change", () => document.querySelectorAll(".plot").forEach((element) =>
    drawn(element) && Plotly.relayout(element, { template: theme() })));
  narrow.addEventListener("change", () => {
    for (const name of Object.keys(NARROW)) if (plot(name)) size(name, plot(name));
    refresh();
  });
  filter();
  state.query = page.excerpts[0].tokens.length - 1;
  if (!recall()) [state.layer, state.head] = page.selected;
  sortList();
  show();
  for (const event of ["hashchange", "popstate"]) addEventListener(event, () => {
    if (!location.hash) [state.layer, state.head] = page.selected;
    if (!location.hash || recall()) show();
  });
  document.documentElement.dataset.ready = "true";
}
start();
