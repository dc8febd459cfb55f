// Tabs of the chosen head with a table of numbers below the figure.
const digits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const percent = (share) => `${Number((100 * share).toPrecision(3))}%`;

/** Fills the table of a tab. */
function fillTable(name, rows) {
  $(`rows-${name}`).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((textContent, i) =>
      Object.assign(document.createElement(i ? "td" : "th"), { textContent }, i ? {} : { scope: "row" })));
    return row;
  }));
}

// ---- a sweep: the head as planes stop

const ENDS = { slow: "slowest", fast: "fastest" };
function showStopped(element, layer, head) {
  refill(element, layer, head);
  const { sweep, arrays } = page;
  const valuesOf = (name, kind) => arrays[`${name}_${kind}`] && [...part(arrays[`${name}_${kind}`], layer, head)];
  const ends = Object.keys(ENDS).filter((kind) => sweep[kind]).map((kind) => ({ kind, shares: sweep[kind],
    labels: (valuesOf("label", kind) ?? []).map((label) => page.labelOrder[label] ?? "–"),
    changes: valuesOf("attention_change", kind) ?? [], inductions: valuesOf("induction", kind) ?? [] }));
  fillTable("stopped", ends.flatMap(({ kind, shares, labels, changes, inductions }) => shares.map((share, i) =>
    [ENDS[kind], percent(share), labels[i] ?? "–", digits(changes[i]), digits(inductions[i])])));
  const marked = element.data.flatMap(({ meta }, i) => ends.filter(({ kind, labels }) =>
    labels.length && meta.y.endsWith(`_${kind}`)).map(({ labels }) => [i, labels]));
  const byLabel = (use) => marked.map(([, labels]) => labels.map(use));
  return Plotly.restyle(element, { "marker.color": byLabel((label) => page.colors[label] ?? "#80868d"), text: byLabel(String),
    "marker.symbol": byLabel((label) => page.symbols[label] ?? "circle-open") }, marked.map(([i]) => i));
}

// ---- reach: how often the head finds a copy, by distance

function showReach(element, layer, head) {
  const { variants, distances } = page.reach;
  const rows = variants.flatMap((variant) => {
    const columns = ["found_share", "found_low", "found_high", "foretold_share"].map((name) => part(page.arrays[`${name} ${variant}`], layer, head));
    const words = (share) => Number.isNaN(share) ? "–" : percent(share);
    return distances.map((distance, i) => [variant, distance.toLocaleString("en"), ...columns.map((column) => words(column[i]))]);
  });
  const run = decode(page.arrays[`found_share ${variants[0]}`]).filter((share, i) => i % distances.length === 0 && share >= 0).length;
  const [first, last] = [rows[0], rows[distances.length - 1]];
  $("reach-words").textContent = first[2] === "–" ? `This head is not among the ${run} heads that were run.`
    : `The head finds ${first[2]} of copies ${first[1]} tokens back, and ${last[2]} of copies ${last[1]} tokens back.`;
  fillTable("reach", rows);
  return refill(element, layer, head);
}
