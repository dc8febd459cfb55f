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
  const { steps, arrays } = page.sweep;
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

// ---- reach: the score of the key it picks, moved away

/** Lowest, mean and highest score of every bin of distances, as figures/reach.py has them. */
function movedScores(layer, head, variant) {
  const { distance, begins, inv_freq, gain, product_real, product_imag } = page.reach;
  const [real, imaginary] = [product_real, product_imag].map((packed) => part(packed, layer, head));
  const planes = [...real.keys()].filter((plane) => Number.isFinite(real[plane]));
  const scores = Array.from(decode(distance), (d) => planes.reduce((sum, plane) => {
    const angle = d * inv_freq[variant][layer][plane];
    return sum + gain[variant][layer][plane] * (real[plane] * Math.cos(angle) - imaginary[plane] * Math.sin(angle));
  }, 0));
  const bins = begins.slice(1).map((end, i) => scores.slice(begins[i], end));
  return [bins.map((some) => Math.min(...some)), bins.map((some) => some.reduce((a, b) => a + b, 0) / some.length),
    bins.map((some) => Math.max(...some))];
}

const tokensBack = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
function showReach(element, layer, head) {
  const variant = Number($("reach-variant").value), { variants, farthest } = page.reach;
  const of = (name, at = variant) => part(page.reach[name], layer, head)[at];
  const interval = (at) => Number.isNaN(of("horizon_low", at)) ? "" : [of("horizon_low", at), of("horizon_high", at)]
    .map((end) => Number.isFinite(end) ? tokensBack(end) : `beyond ${tokensBack(farthest)}`).join(" to ");
  const measured = variants.map((_, at) => at).filter((at) => !Number.isNaN(of("horizon", at)));
  fold("reach", ["rotation", "horizon (tokens)", "95% interval", "lowest score, above others (nats)", "wins where it stands"],
    measured.map((at) => [variants[at], lost(at), interval(at) || "–", digits(of("lowest_score", at) - of("others_level", at)), percent(of("unmoved_win_share", at))]));
  /** Where the picked key falls to the level of the others. */
  function lost(at) {
    const horizon = of("horizon", at);
    if (of("lowest_score", at) > of("others_level", at)) return "at no distance";
    return horizon === 0 ? "everywhere" : Number.isFinite(horizon) ? tokensBack(horizon) : `not up to ${tokensBack(farthest)}`;
  }
  const at = [0, 1, 2, 4, 5];
  if (!measured.length) {
    $("told-reach").textContent = "The reach of this head was not measured.";
    return Plotly.restyle(element, { y: at.map(() => []) }, at);
  }
  const where = lost(variant), level = of("others_level"), horizon = of("horizon");
  const falls = where === "at no distance" ? "stays above the others at any distance"
    : where === "everywhere" ? "scores below the others wherever it stands"
    : where.startsWith("not") ? `stays above the others, at least up to ${tokensBack(farthest)} tokens`
    : `falls to the level of the others at ${where} tokens${interval(variant) && ` (95%: ${interval(variant)})`}`;
  $("told-reach").textContent = `The key it picks, ${tokensBack(of("picked_distance", 0))} tokens back on average, ${falls}.`;
  const [low, mean, high] = movedScores(layer, head, variant).map((scores) => scores.map((score) => score - level));
  const there = horizon > 0 && Number.isFinite(horizon);
  const ends = there && interval(variant) ? [of("horizon_low"), Math.min(of("horizon_high"), farthest)] : [horizon, horizon];
  const lowest = of("lowest_score") - level, diamond = there ? [0] : [];
  Plotly.restyle(element, { x: [there ? [horizon + 1] : []], hovertemplate: `horizon ${where} tokens<extra></extra>`,
    "error_x.array": [[Math.max(ends[1] - horizon, 0)]], "error_x.arrayminus": [[Math.max(horizon - ends[0], 0)]] }, [5]);
  const middle = Array.from(element._fullData[2].x, (x) => x - 1);
  return Plotly.restyle(element, { y: [low, high, mean, [lowest, lowest], diamond],
    customdata: [null, null, middle.map((d, i) => [d, low[i], high[i]]), null, null] }, at);
}
$("reach-variant")?.addEventListener("change", () => showReach(plot("reach"), state.layer, state.head));
