// The choice of the reader: one state for all views and for the address (#L3H5&tab=attention).
// `pin` is a head [layer, head] that stays next to the chosen head. A `band` {from, to, mode} is a
// range of planes that stop, are dropped or are scaled, counted from the fastest plane.
const FIRST = {
  layer: page.selected[0],
  head: page.selected[1],
  view: $("all").querySelector("[role=tab]").dataset.tab,
  by: "",
  tab: page.prompt ? "attention" : $("one-tab-selectivity").dataset.tab,
  excerpt: 0,
  query: page.excerpts[0].tokens.length - 1,
  key: null,
  auto: true,
  against: null,
  distance: null,
  band: null,
  mode: "stop",
  factor: 0.5,
  pin: null,
};
const state = { ...FIRST };

// ---- heads

/** The row of a head in the table of heads, or -1. */
function rowOf(layer, head) {
  return page.rows[layer][head];
}

function headExists([layer, head]) {
  return page.rows[layer]?.[head] >= 0;
}

/** The layer and the index of the head in each row of the table. */
const places = [];
page.rows.forEach((rows, layer) => {
  rows.forEach((row, head) => {
    if (row >= 0) {
      places[row] = [layer, head];
    }
  });
});

/** The number of a head in a column of the table. */
function numberAt(column, row) {
  return decode(page.columns[column])[row];
}

/** The shares of sinks, position, shared bits, content and both. */
function bitShares(row) {
  return [...decode(page.shares).subarray(5 * row, 5 * row + 5)];
}

/** The numbers of a head in an array. */
function partOfHead(packed, layer, head) {
  return part(packed, { layer, head, kv_head: page.kvHeads[layer][head] });
}

/** The name of a head, as readers see it. */
function headName(layer, head) {
  return `L${layer} H${head}`;
}

// ---- the address

function writeHead([layer, head]) {
  return `L${layer}H${head}`;
}

function writePair() {
  if (state.key !== null) {
    return `pair=${state.query}-${state.key}`;
  }
  const last = page.excerpts[state.excerpt].tokens.length - 1;
  return !state.auto && state.query !== last ? `query=${state.query}` : "";
}

function writeBand() {
  if (!state.band) {
    return "";
  }
  const { from, to, mode } = state.band;
  const factor = mode === "scale" ? `x${state.factor}` : "";
  return `${mode}=${from}-${to}${factor}`;
}

/** The address of the present choice. */
function address() {
  const parts = [
    writeHead([state.layer, state.head]),
    state.view !== FIRST.view ? `view=${state.view}` : "",
    state.by ? `by=${state.by}` : "",
    state.tab !== FIRST.tab ? `tab=${state.tab}` : "",
    state.excerpt > 0 ? `text=${state.excerpt + 1}` : "",
    writePair(),
    writeBand(),
    state.pin ? `pin=${writeHead(state.pin)}` : "",
  ];
  return `#${parts.filter(Boolean).join("&")}`;
}

/** Writes the choice into the address. "back" undoes a `step`. */
function remember(step) {
  if (!document.documentElement.dataset.ready || address() === location.hash) {
    return;
  }
  if (step) {
    history.pushState(null, "", address());
  } else {
    history.replaceState(null, "", address());
  }
}

/** The head [layer, head] in "L3H5" if it exists, or null. */
function readHead(text) {
  const match = /^L(\d+)H(\d+)$/.exec(text ?? "");
  const place = match?.slice(1).map(Number);
  return place && headExists(place) ? place : null;
}

/** The two numbers in "3-5", or null. */
function readRange(text) {
  const match = /^(\d+)-(\d+)$/.exec(text ?? "");
  return match ? match.slice(1).map(Number) : null;
}

/** The parts "name=value" of an address by name. */
function readParts(texts) {
  return Object.fromEntries(texts.map((text) => text.split("=", 2)));
}

/** The chosen text, query and key. */
function recallPair(given) {
  const number = Number(given.text) - 1;
  const excerpt = page.excerpts[number] ? number : 0;
  const { length } = page.excerpts[excerpt].tokens;
  const lone = /^\d+$/.test(given.query ?? "") ? Number(given.query) : length - 1;
  const [query, key] = readRange(given.pair) ?? [lone, null];
  const known = query < length;
  return {
    excerpt,
    query: known ? query : length - 1,
    key: known && key !== null && key <= query ? key : null,
    auto: given.query === undefined && key === null,
    against: null,
    distance: null,
  };
}

/** The stopped planes of a layer. */
function recallBand(given, layer) {
  const mode = ["stop", "drop", "scale"].find((name) => given[name] !== undefined) ?? "stop";
  const [planes, factor] = (given[mode] ?? "").split("x");
  const [from, to] = readRange(planes) ?? [0, -1];
  const known = from <= to && to < page.planes[layer];
  return {
    mode,
    factor: factor >= 0 ? Number(factor) : FIRST.factor,
    band: known ? { from, to, mode } : null,
  };
}

/** Reads the choice from the address and ignores unknown names. An address that begins with a view
 * or a tab keeps the chosen head. Returns false if the address has no head. */
function recall() {
  const parts = location.hash.slice(1).split("&");
  const complete = !/^(view|tab)=/.test(parts[0]);
  const place = complete ? readHead(parts.shift()) : [state.layer, state.head];
  if (!place) {
    return false;
  }
  const given = readParts(parts);
  const menu = [...$("map-by").options].map(({ value }) => value);
  const before = complete ? FIRST : state;
  Object.assign(state, recallPair(given), recallBand(given, place[0]), {
    layer: place[0],
    head: place[1],
    view: $(`all-tab-${given.view}`) ? given.view : before.view,
    tab: $(`one-tab-${given.tab}`) ? given.tab : before.tab,
    by: menu.includes(given.by) ? given.by : "",
    pin: readHead(given.pin),
  });
  $("head").classList.add("open");
  return true;
}
