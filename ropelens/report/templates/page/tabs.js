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

// ---- reach: how often it finds a copy, by distance

function showReach(element, layer, head) {
  const { variants, distances } = page.reach;
  const rows = variants.flatMap((variant) => {
    const of = Object.fromEntries(["share", "low", "high"].map((end) => [end, part(page.arrays[`found_${end} ${variant}`], layer, head)]));
    const foretold = part(page.arrays[`foretold_share ${variant}`], layer, head);
    const words = (share) => Number.isNaN(share) ? "–" : percent(share);
    return distances.map((distance, i) => [variant, distance.toLocaleString("en"), ...[of.share[i], of.low[i], of.high[i], foretold[i]].map(words)]);
  });
  const run = decode(page.arrays[`found_share ${variants[0]}`]).filter((share, i) => i % distances.length === 0 && share >= 0).length;
  const [first, last] = [rows[0], rows[distances.length - 1]];
  $("told-reach").textContent = first[2] === "–" ? `This head is not among the ${run} that were run.`
    : `It finds ${first[2]} of copies that stand ${first[1]} tokens back, and ${last[2]} at ${last[1]}.`;
  fold("reach", rows);
  return refill(element, layer, head);
}
