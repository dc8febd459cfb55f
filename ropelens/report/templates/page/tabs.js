// Tabs of the chosen head that tell a sentence, and fold their numbers into a table.
const digits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const percent = (share) => `${Number((100 * share).toPrecision(3))}%`;

/** The folded table of a tab: titles, then rows of cells. */
function fold(name, titles, rows) {
  const line = (cells, tag) => {
    const row = document.createElement("tr");
    row.append(...cells.map((textContent, i) => {
      const cell = Object.assign(document.createElement(i ? tag : "th"), { textContent });
      if (cell.tagName === "TH") cell.scope = tag === "td" ? "row" : "col";
      return cell;
    }));
    return row;
  };
  const [head, body] = $(`rows-${name}`).children;
  head.replaceChildren(line(titles, "th"));
  body.replaceChildren(...rows.map((cells) => line(cells, "td")));
}

// ---- norms: which planes its queries and keys are long in

function tellPlanes(layer, head) {
  const names = ["selectivity_keys", "q_norm", "k_norm", "q_coherence", "k_coherence"];
  const planes = page.frequencies[layer].slice(0, page.planes[layer]).map((frequency, plane) =>
    [span(frequency), ...names.map((name) => part(page.arrays[name], layer, head)[plane])]);
  const longest = (column) => {
    const lengths = planes.map((plane) => plane[column]).filter(Number.isFinite).sort((a, b) => b - a);
    const [wavelength] = planes.find((plane) => plane[column] === lengths[0]) ?? [];
    const usual = lengths[lengths.length >> 1];
    return wavelength && `${wavelength} tokens (${(lengths[0] / usual).toPrecision(2)} times the median plane)`;
  };
  const [query, key] = [longest(2), longest(3)];
  $("told-selectivity").textContent = query && key ? `Queries are longest in the plane of ${query}, keys in that of ${key}.` : "";
  fold("selectivity", ["wavelength (tokens)", "push (nats)", "query norm", "key norm", "query coherence", "key coherence"],
    planes.map(([wavelength, ...values]) => [wavelength, ...values.map(digits)]));
}

// ---- a sweep: what became of the head as planes stop

const ENDS = { slow: "slowest", fast: "fastest" };
function showStopped(element, layer, head) {
  refill(element, layer, head);
  const { steps } = page.sweep, { arrays } = page;
  const at = (name, kind) => arrays[`${name}_${kind}`] && [...part(arrays[`${name}_${kind}`], layer, head)];
  const ends = Object.keys(ENDS).filter((kind) => steps[kind]).map((kind) => ({ kind, shares: steps[kind],
    labels: (at("label", kind) ?? []).map((label) => page.labelOrder[label] ?? "–"),
    changes: at("attention_change", kind) ?? [], inductions: at("induction", kind) ?? [] }));
  const told = ends.map(({ kind, shares, labels, changes }) => {
    const turned = labels.findIndex((label) => label !== labels[0]);
    const step = turned < 0 ? shares.length - 1 : turned;
    const then = [turned < 0 ? "" : `then ${labels[turned]}`,
      Number.isFinite(changes[step]) ? `its attention changed by ${changes[step].toFixed(2)} bits` : ""].filter(Boolean).join(", ");
    return `${turned < 0 ? "also when" : "until"} the ${ENDS[kind]} ${percent(1 - shares[step])} of the planes stop${then && ` (${then})`}`;
  });
  const first = ends[0].labels[0] ?? "–";
  $("told-stopped").textContent = first === "–" ? "" : `It is ${first} ${told.join(", and ")}.`;
  fold("stopped", ["planes stopped", "rotate", "label", "attention, change (bits)", "induction (0–1)"],
    ends.flatMap(({ kind, shares, labels, changes, inductions }) => shares.map((share, i) =>
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
  fold("reach", ["rotation", "horizon (tokens)", "from (95%)", "to", "wins where it stands"], measured.map((at) =>
    [variants[at], ...["horizon", "horizon_low", "horizon_high"].map((name) => end(of(name, at))), percent(of("unmoved_win_share", at))]));
  return refill(element, layer, head);
}
