// Tabs of the chosen head that fold their numbers into a table.
const digits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const percent = (share) => `${Number((100 * share).toPrecision(3))}%`;

/** The folded rows of a tab. */
function fold(name, rows) {
  $(`rows-${name}`).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((textContent, i) =>
      Object.assign(document.createElement(i ? "td" : "th"), { textContent }, i ? {} : { scope: "row" })));
    return row;
  }));
}

// ---- a sweep: what became of the head as planes stop

const ENDS = { slow: "slowest", fast: "fastest" };
function showStopped(element, layer, head) {
  refill(element, layer, head);
  const { sweep, arrays } = page;
  const at = (name, kind) => arrays[`${name}_${kind}`] && [...part(arrays[`${name}_${kind}`], layer, head)];
  const ends = Object.keys(ENDS).filter((kind) => sweep[kind]).map((kind) => ({ kind, shares: sweep[kind],
    labels: (at("label", kind) ?? []).map((label) => page.labelOrder[label] ?? "–"),
    changes: at("attention_change", kind) ?? [], inductions: at("induction", kind) ?? [] }));
  fold("stopped", ends.flatMap(({ kind, shares, labels, changes, inductions }) => shares.map((share, i) =>
    [ENDS[kind], percent(share), labels[i] ?? "–", digits(changes[i]), digits(inductions[i])])));
  const marked = element.data.flatMap(({ meta }, i) => ends.filter(({ kind, labels }) =>
    labels.length && meta.y.endsWith(`_${kind}`)).map(({ labels }) => [i, labels]));
  const of = (use) => marked.map(([, labels]) => labels.map(use));
  return Plotly.restyle(element, { "marker.color": of((label) => page.colors[label] ?? "#80868d"), text: of(String),
    "marker.symbol": of((label) => page.symbols[label] ?? "circle-open") }, marked.map(([i]) => i));
}

// ---- reach: how often the key it picks still wins, moved away

const tokensBack = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
function showReach(element, layer, head) {
  const { variants, farthest } = page.reach, { arrays } = page;
  const of = (name, at) => part(arrays[name], layer, head)[at];
  const measured = variants.map((_, at) => at).filter((at) => !Number.isNaN(of("horizon", at)));
  $("told-reach").textContent = measured.length ? `The key it picks is ${tokensBack(of("picked_distance", 0))} tokens back on average.`
    : "The reach of this head was not measured.";
  const end = (value) => Number.isNaN(value) ? "–" : Number.isFinite(value) ? tokensBack(value) : `beyond ${tokensBack(farthest)}`;
  fold("reach", measured.map((at) =>
    [variants[at], ...["horizon", "horizon_low", "horizon_high"].map((name) => end(of(name, at))), percent(of("unmoved_win_share", at))]));
  return refill(element, layer, head);
}
