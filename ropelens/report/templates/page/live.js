// Computes the attention of the chosen head if some of its planes stop.

/** Weights of a head without the planes that are stopped. */
let last = {};
function shownWeights(layer, head, model = page) {
  const band = model.live[layer][head] ? bandOf(layer, model) : null, excerpt = excerptOf(model);
  const asked = JSON.stringify([model === page, excerpt, layer, head, band, state.factor]);
  if (last[asked] === undefined) {
    if (Object.keys(last).length > 3) last = {};
    last[asked] = band ? attend(excerpt, layer, head, band, model) : unmodifiedWeights(excerpt, layer, head, model);
  }
  return last[asked];
}

/** Index of the chosen text among the excerpts of a model, or -1. */
const excerptOf = (model) => model === page ? state.excerpt : model.excerptOf[state.excerpt];

const wavelengths = (layer, model) => turning(layer, null, model).map((frequency) => frequency > 0 ? 2 * Math.PI / frequency : Infinity);

/** The planes that stop in a layer, or null. In the other model these are the planes with the same
 * wavelengths. If the slowest planes of the page's model stop, all slower planes stop as well. */
function bandOf(layer, model) {
  const { band } = state;
  if (!band || model === page) return band;
  const stopped = wavelengths(state.layer, page).slice(band.from, band.to + 1);
  const shortest = Math.min(...stopped) * (1 - 1e-6);
  const longest = keptOf(band) !== null ? Infinity : Math.max(...stopped) * (1 + 1e-6);
  const moves = (wave) => wave < Infinity || band.mode !== "stop";
  const planes = wavelengths(layer, model).flatMap((wave, plane) =>
    shortest <= wave && wave <= longest && moves(wave) ? [plane] : []);
  return planes.length ? { ...band, from: planes[0], to: planes.at(-1) } : null;
}

function stopBand(band) {
  state.band = band && band.from <= band.to ? band : null;
  showBand();
  remember(false);
  return refresh();
}

/** Indices of the planes of a layer that rotate. p is a share of these planes. */
const turns = (layer = state.layer, model = page) =>
  turning(layer, null, model).flatMap((frequency, plane) => frequency > 0 ? [plane] : []);
/** Number of planes that still rotate if a band stops the slowest rotating planes, as p-RoPE does; or null. */
function keptOf(band, layer = state.layer) {
  const moving = turns(layer), kept = moving.filter((plane) => plane < band.from).length;
  return kept < moving.length && band.to >= moving.at(-1) ? kept : null;
}
const threeDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const span = (frequency) => frequency > 0 ? threeDigits.format(2 * Math.PI / frequency) : "∞";

const NOT_LIVE = "The planes of this head cannot be stopped here. Either the profile does not have its queries and keys (a short --prompt leaves room for more heads), or a soft-cap, window or sink changes its attention.";
function showBand() {
  const { layer, head, band } = state;
  const live = page.live[layer][head], count = page.planes[layer], rotating = turns().length;
  const names = page.frequencies[layer].slice(0, count).map(span);
  for (const [id, at] of [["live-from", band?.from ?? ""], ["live-to", band?.to ?? ""]]) {
    if ($(id).dataset.planes !== String(names)) {
      $(id).dataset.planes = names;
      $(id).replaceChildren(option("", "–"), ...names.map((name, plane) => option(plane, name)));
    }
    $(id).value = at;
  }
  const kept = (band && keptOf(band)) ?? rotating;
  $("live-p").max = rotating;
  $("live-p").value = kept;
  $("live-share").textContent = rotating ? (kept / rotating).toFixed(2) : "–";
  $("live-p").setAttribute("aria-valuetext", $("live-share").textContent);
  $("live-mode").value = band?.mode ?? state.mode;
  $("live-by").value = state.factor;
  $("live-by").hidden = $("live-mode").value !== "scale";
  for (const control of $("live").querySelectorAll("input, select, button")) {
    control.disabled = !(live && count && (rotating || control.id !== "live-p")) && control.id !== "pick-excerpt";
  }
  $("live-words").textContent = live ? bandWords(band, layer) : NOT_LIVE;
  $("live-words").hidden = live && count && rotating && !band;
}

function bandWords(band, layer, model = page) {
  const count = model.planes[layer], rotating = turns(layer, model).length, frequencies = model.frequencies[layer];
  if (!count) return "This layer does not rotate, so it has no planes to stop.";
  if (!rotating && (band?.mode ?? "stop") === "stop") return "No plane of this layer rotates, so no plane can stop. Choose planes that are removed or scaled.";
  if (!band) return "All planes rotate. Lower p or choose planes to see the head without them.";
  const many = band.to - band.from + 1;
  const kept = model === page && band.mode === "stop" ? keptOf(band, layer) : null;
  const p = kept === null ? "" : `p = ${(kept / rotating).toFixed(2)}: `;
  const ends = [span(frequencies[band.from]), span(frequencies[band.to])];
  const planes = many === 1 ? `the plane of ${ends[0]} tokens` : `${many} planes (${ends.join(" to ")} tokens)`;
  const [verb, verbs] = { stop: ["stop rotating", "stops rotating"], drop: ["are removed", "is removed"],
    scale: [`are scaled by ${state.factor}`, `is scaled by ${state.factor}`] }[band.mode];
  return `${p}${planes} ${many === 1 ? verbs : verb} in this head.`;
}

/** The colour of stopped planes, which no label has. */
const STOPPED = "#006d9c";

/** Marks the stopped planes in the figure of planes. */
function markBand(element, layer, head, model) {
  const before = element.layout.shapes ?? [], band = bandOf(layer, model);
  const shapes = before.filter(({ name }) => name !== "band");
  if (!band && shapes.length === before.length) return null;
  if (band && model.live[layer][head]) {
    const at = [...part(model.arrays.wavelength_position, layer, 0, model)].slice(0, model.planes[layer]);
    const step = at.length > 1 ? Math.sqrt(at[1] / at[0]) : 1.3;
    shapes.push({ name: "band", type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, layer: "below",
      x0: at[Math.min(band.from, at.length - 1)] / step, x1: at[Math.min(band.to, at.length - 1)] * step,
      line: { width: 0 }, fillcolor: `${STOPPED}38` });
  }
  return Plotly.relayout(element, { shapes });
}

/** Adds the attention by distance on this excerpt to the kernel: unmodified, and with stopped planes. */
function showDistances(element, layer, head, model) {
  const extra = element.data.findIndex(({ meta }) => meta?.role === "excerpt");
  if (extra >= 0) Plotly.deleteTraces(element, element.data.map((_, i) => i).slice(extra));
  const excerpt = excerptOf(model);
  if (!bandOf(layer, model) || !model.live[layer][head] || excerpt < 0) return null;
  const lines = [["this excerpt, unmodified", unmodifiedWeights(excerpt, layer, head, model), "dot"],
    ["this excerpt, planes stopped", shownWeights(layer, head, model), "solid"]];
  return Plotly.addTraces(element, lines.map(([name, weights, dash]) => {
    const y = byDistance(weights);
    return { name, y, x: y.map((_, distance) => distance + 1), mode: "lines", meta: { role: "excerpt" },
      line: { color: STOPPED, width: 2, dash }, hovertemplate: `%{y:.2%} ${name}<extra></extra>` };
  }));
}

/** Names as many tokens on the axes as there is room for. */
function tokenAxes(ticks, wide) {
  const every = Math.ceil(ticks.length / (wide ? 50 : 24));
  const kept = (_, i) => i % every === 0;
  const at = ticks.map((_, i) => i).filter(kept), named = ticks.filter(kept);
  const size = wide ? 10 : 11, last = ticks.length - 0.5;
  return { "xaxis.tickvals": at, "xaxis.ticktext": named, "xaxis.tickfont.size": size, "xaxis.range": [-0.5, last],
    "yaxis.tickvals": at, "yaxis.ticktext": named, "yaxis.tickfont.size": size, "yaxis.range": [last, -0.5] };
}

function showAttention(element, layer, head, model) {
  const { names, ticks } = model.excerpts[excerptOf(model)];
  const at = names.map((_, i) => i);
  const named = names.map((query) => names.map((key) => [query, key]));
  const changed = { x: [at], y: [at], z: [shownWeights(layer, head, model)], customdata: [named] };
  return Plotly.update(element, changed, tokenAxes(ticks, element.clientWidth > 520));
}

for (const [id, end] of [["live-from", "from"], ["live-to", "to"]]) {
  $(id).addEventListener("change", ({ target: { value } }) => {
    if (value === "") return stopBand(null);
    const plane = Number(value), band = { mode: state.mode, from: plane, to: plane, ...state.band, [end]: plane };
    return stopBand({ ...band, from: Math.min(band.from, end === "to" ? plane : Infinity), to: Math.max(band.to, end === "from" ? plane : 0) });
  });
}
$("live-p").addEventListener("input", ({ target: { value } }) => {
  const moving = turns(), kept = Number(value);
  stopBand(kept < moving.length ? { from: moving[kept], to: moving.at(-1), mode: state.mode } : null);
});
$("live-mode").addEventListener("change", ({ target: { value } }) => {
  state.mode = value;
  stopBand(state.band && { ...state.band, mode: value });
});
$("live-by").addEventListener("input", ({ target: { value } }) => {
  if (value === "" || !(value >= 0)) return;
  state.factor = Number(value);
  stopBand(state.band);
});
$("live-reset").addEventListener("click", () => stopBand(null));
$("pick-excerpt").replaceChildren(...page.excerpts.map(({ tokens }, i) =>
  option(i, `${i + 1}: ${tokens.slice(0, 6).join("").replaceAll("␣", " ")}…`)));
$("pick-excerpt").addEventListener("change", ({ target: { value } }) => chooseExcerpt(Number(value)));
