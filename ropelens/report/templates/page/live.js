// Computes the attention of the chosen head if some of its planes stop.
const MAX_KEPT_WEIGHTS = 4;
const keptWeights = new Map();

/** Weights [query][key] of a head with the planes that are stopped. */
function shownWeights(layer, head) {
  const { excerpt, factor } = state;
  const band = page.live[layer][head] ? state.band : null;
  const key = JSON.stringify([excerpt, layer, head, band, factor]);
  if (!keptWeights.has(key)) {
    if (keptWeights.size >= MAX_KEPT_WEIGHTS) {
      keptWeights.clear();
    }
    const weights = band
      ? attend(excerpt, layer, head, band)
      : unmodifiedWeights(excerpt, layer, head);
    keptWeights.set(key, weights);
  }
  return keptWeights.get(key);
}

function stopBand(band) {
  state.band = band && band.from <= band.to ? band : null;
  showBand();
  remember(false);
  return refresh();
}

/** Indices of the planes of a layer that rotate. p is a share of these planes. */
function rotatingPlanes(layer) {
  const planes = [];
  turning(layer, null).forEach((frequency, plane) => {
    if (frequency > 0) {
      planes.push(plane);
    }
  });
  return planes;
}

/** Number of planes that still rotate if a band stops the slowest rotating planes, as p-RoPE does;
 * null for other bands. */
function keptOf(band, layer) {
  const rotating = rotatingPlanes(layer);
  const kept = rotating.filter((plane) => plane < band.from).length;
  const isSlowest = kept < rotating.length && band.to >= rotating.at(-1);
  return isSlowest ? kept : null;
}

const threeDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** The wavelength of a frequency in words. */
function wavelengthWords(frequency) {
  return frequency > 0 ? threeDigits.format((2 * Math.PI) / frequency) : "∞";
}

const NOT_LIVE =
  "The planes of this head cannot be stopped here. Either the profile does not have its queries " +
  "and keys (a short --prompt leaves room for more heads), or a soft-cap, window or sink changes " +
  "its attention.";

// ---- controls

/** Shows the stopped planes in the controls, and describes them. */
function showBand() {
  const { layer, head, band } = state;
  const rotating = rotatingPlanes(layer).length;
  const live = page.live[layer][head];
  listPlanes("live-from", band?.from ?? "");
  listPlanes("live-to", band?.to ?? "");
  showShare(rotating);
  $("live-mode").value = band?.mode ?? state.mode;
  $("live-by").value = state.factor;
  $("live-by").hidden = $("live-mode").value !== "scale";
  const planes = page.planes[layer];
  for (const control of $("live").querySelectorAll("input, select, button")) {
    const useful = live && planes && (rotating || control.id !== "live-p");
    control.disabled = !useful && control.id !== "pick-excerpt";
  }
  $("live-words").textContent = live ? bandWords(band, layer) : NOT_LIVE;
  $("live-words").hidden = live && planes && rotating && !band;
}

/** Lists the wavelengths of the planes in a menu, and chooses one. */
function listPlanes(id, chosen) {
  const { layer } = state;
  const frequencies = page.frequencies[layer].slice(0, page.planes[layer]);
  const names = frequencies.map(wavelengthWords);
  if ($(id).dataset.planes !== String(names)) {
    $(id).dataset.planes = names;
    $(id).replaceChildren(option("", "–"), ...names.map((name, plane) => option(plane, name)));
  }
  $(id).value = chosen;
}

/** Shows p, the share of the planes that rotate. */
function showShare(rotating) {
  const { band, layer } = state;
  const kept = (band && keptOf(band, layer)) ?? rotating;
  const share = rotating ? (kept / rotating).toFixed(2) : "–";
  $("live-p").max = rotating;
  $("live-p").value = kept;
  $("live-p").setAttribute("aria-valuetext", share);
  $("live-share").textContent = share;
}

/** Describes the planes that stop. */
function bandWords(band, layer) {
  const rotating = rotatingPlanes(layer).length;
  if (!page.planes[layer]) {
    return "This layer does not rotate, so it has no planes to stop.";
  }
  if (!rotating && (band?.mode ?? "stop") === "stop") {
    return (
      "No plane of this layer rotates, so no plane can stop. " +
      "Choose planes that are removed or scaled."
    );
  }
  if (!band) {
    return "All planes rotate. Lower p or choose planes to see the head without them.";
  }
  const kept = band.mode === "stop" ? keptOf(band, layer) : null;
  const share = kept === null ? "" : `p = ${(kept / rotating).toFixed(2)}: `;
  return `${share}${planesWords(band, layer)} in this head.`;
}

/** The planes of a band and what happens to them: "3 planes (2 to 8 tokens) stop rotating". */
function planesWords(band, layer) {
  const count = band.to - band.from + 1;
  const first = wavelengthWords(page.frequencies[layer][band.from]);
  const last = wavelengthWords(page.frequencies[layer][band.to]);
  const [verb, verbOfOne] = {
    stop: ["stop rotating", "stops rotating"],
    drop: ["are removed", "is removed"],
    scale: [`are scaled by ${state.factor}`, `is scaled by ${state.factor}`],
  }[band.mode];
  if (count === 1) {
    return `the plane of ${first} tokens ${verbOfOne}`;
  }
  return `${count} planes (${first} to ${last} tokens) ${verb}`;
}

// ---- figures

/** The colour of stopped planes, which no label has. */
const STOPPED = "#006d9c";

function showSelectivity(element, layer, head) {
  refill(element, layer, head);
  return markBand(element, layer, head);
}

/** Marks the stopped planes in the figure of planes. */
function markBand(element, layer, head) {
  const { band } = state;
  const before = element.layout.shapes ?? [];
  const shapes = before.filter(({ name }) => name !== "band");
  if (!band && shapes.length === before.length) {
    return null;
  }
  if (band && page.live[layer][head]) {
    shapes.push(bandShape(band, layer));
  }
  return Plotly.relayout(element, { shapes });
}

/** A rectangle behind the planes of a band. */
function bandShape(band, layer) {
  const all = part(page.arrays.wavelength_position, { layer });
  const positions = [...all].slice(0, page.planes[layer]);
  const last = positions.length - 1;
  const halfStep = last > 0 ? Math.sqrt(positions[1] / positions[0]) : 1.3;
  return {
    name: "band",
    type: "rect",
    layer: "below",
    xref: "x",
    x0: positions[Math.min(band.from, last)] / halfStep,
    x1: positions[Math.min(band.to, last)] * halfStep,
    yref: "paper",
    y0: 0,
    y1: 1,
    line: { width: 0 },
    fillcolor: `${STOPPED}38`,
  };
}

function showKernel(element, layer, head) {
  refill(element, layer, head);
  return showDistances(element, layer, head);
}

/** Adds the attention by distance on this excerpt to the kernel, if planes are stopped. */
function showDistances(element, layer, head) {
  const extra = element.data.findIndex(({ meta }) => meta?.role === "excerpt");
  if (extra >= 0) {
    const indices = [...element.data.keys()];
    Plotly.deleteTraces(element, indices.slice(extra));
  }
  if (!state.band || !page.live[layer][head]) {
    return null;
  }
  const unmodified = unmodifiedWeights(state.excerpt, layer, head);
  return Plotly.addTraces(element, [
    distanceLine("this excerpt, unmodified", unmodified, "dot"),
    distanceLine("this excerpt, planes stopped", shownWeights(layer, head), "solid"),
  ]);
}

function distanceLine(name, weights, dash) {
  const y = byDistance(weights);
  return {
    name,
    x: y.map((_, distance) => distance + 1),
    y,
    mode: "lines",
    meta: { role: "excerpt" },
    line: { color: STOPPED, width: 2, dash },
    hovertemplate: `%{y:.2%} ${name}<extra></extra>`,
  };
}

function showAttention(element, layer, head) {
  const { names, ticks } = page.excerpts[state.excerpt];
  const positions = [...names.keys()];
  const pairs = names.map((query) => names.map((key) => [query, key]));
  const weights = shownWeights(layer, head);
  const changed = { x: [positions], y: [positions], z: [weights], customdata: [pairs] };
  return Plotly.update(element, changed, tokenAxes(ticks, element.clientWidth > 520));
}

/** Names as many tokens on the axes as there is room for. */
function tokenAxes(ticks, wide) {
  const every = Math.ceil(ticks.length / (wide ? 50 : 24));
  const named = [...ticks.keys()].filter((position) => position % every === 0);
  const names = named.map((position) => ticks[position]);
  const size = wide ? 10 : 11;
  const last = ticks.length - 0.5;
  return {
    "xaxis.tickvals": named,
    "xaxis.ticktext": names,
    "xaxis.tickfont.size": size,
    "xaxis.range": [-0.5, last],
    "yaxis.tickvals": named,
    "yaxis.ticktext": names,
    "yaxis.tickfont.size": size,
    "yaxis.range": [last, -0.5],
  };
}

// ---- the reader stops planes

$("live-from").addEventListener("change", ({ target: { value } }) => {
  if (value === "") {
    return stopBand(null);
  }
  const from = Number(value);
  const { to, mode } = state.band ?? { to: from, mode: state.mode };
  return stopBand({ from, to: Math.max(to, from), mode });
});
$("live-to").addEventListener("change", ({ target: { value } }) => {
  if (value === "") {
    return stopBand(null);
  }
  const to = Number(value);
  const { from, mode } = state.band ?? { from: to, mode: state.mode };
  return stopBand({ from: Math.min(from, to), to, mode });
});
$("live-p").addEventListener("input", ({ target: { value } }) => {
  const rotating = rotatingPlanes(state.layer);
  const kept = Number(value);
  if (kept >= rotating.length) {
    return stopBand(null);
  }
  return stopBand({ from: rotating[kept], to: rotating.at(-1), mode: state.mode });
});
$("live-mode").addEventListener("change", ({ target: { value } }) => {
  state.mode = value;
  stopBand(state.band && { ...state.band, mode: value });
});
$("live-by").addEventListener("input", ({ target: { value } }) => {
  if (value !== "" && value >= 0) {
    state.factor = Number(value);
    stopBand(state.band);
  }
});
$("live-reset").addEventListener("click", () => stopBand(null));
