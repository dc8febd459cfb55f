// The planes of the chosen pair: dials, pushes, and the score at other distances.

/** Shows the figure of a pair, and its controls and dials if it is the chosen head. */
function showPair(element, layer, head) {
  const { query } = state;
  const key = keyOf(query);
  const distance = state.distance ?? query - key;
  const pair = pairOf(query, key, layer, head);
  if (element === plot("pair")) {
    showControls(query, key, distance, pair);
  }
  const roles = element.data.map(({ meta }) => meta?.role);
  const traces = ["push", "score", "here"].map((role) => roles.indexOf(role));
  if (!pair) {
    return Plotly.restyle(element, { x: [[], [], []], y: [[], [], []] }, traces);
  }
  const slope = distance === query - key ? slopeOf(query, key, layer, head) : NaN;
  const bars = pushBars(pair, distance, layer, slope);
  const scores = scoresByDistance(pair, distance, layer);
  const changed = {
    x: [bars.x, [...scores.keys()], [distance]],
    y: [bars.y, scores, [scores[distance]]],
    width: [bars.width, null, null],
    customdata: [bars.customdata, null, null],
  };
  return Plotly.restyle(element, changed, traces);
}

/** A bar for the push of each plane, with its wavelength and its effect on the next token. */
function pushBars(pair, distance, layer, slope) {
  const pushes = pushesOf(pair, distance);
  const positions = part(page.arrays.wavelength_position, { layer });
  const shown = pushes.slice(0, positions.findLastIndex(Number.isFinite) + 1);
  const customdata = shown.map((push, plane) => {
    const frequency = page.frequencies[layer][plane];
    const wavelength = frequency > 0 ? (2 * Math.PI) / frequency : Infinity;
    const effect = `${nats(slope * push, twoDigits)} nats in the lead of the next token`;
    return [wavelength, Number.isFinite(slope) ? `<br>${effect}` : ""];
  });
  return {
    x: positions.slice(0, shown.length),
    y: shown,
    width: positions.map((position) => 0.3 * position),
    customdata,
  };
}

/** Scores of a pair at each distance from 0. */
function scoresByDistance(pair, distance, layer) {
  const length = Math.max(page.farthest[layer], distance) + 1;
  return Array.from({ length }, (_, other) => scoreAt(pair, other));
}

function scoreAt({ product, frequencies }, distance) {
  return sumOf(terms(product, frequencies, distance));
}

function showControls(query, key, distance, pair) {
  $("pair-query").value = query;
  $("pair-key").value = key;
  $("pair-against").value = state.against ?? "";
  [...$("pair-key").options].forEach((choice, position) => {
    choice.disabled = position > query;
  });
  [...$("pair-against").options].forEach((choice, number) => {
    // The first one is "all other keys".
    choice.disabled = number > query + 1 || number === key + 1;
  });
  $("pair-distance").max = page.farthest[state.layer];
  $("pair-distance").value = distance;
  $("pair-distance").disabled = !pair;
  if (pair) {
    drawDials(pair, distance);
  } else {
    $("dials").replaceChildren();
  }
  $("pair-lead").replaceChildren(...leadWords(query, key, pair));
  $("pair-score").textContent = pair ? scoreWords(query, key, distance, pair) : NOT_LIVE;
}

/** The score of a pair at a distance, in the chosen head and in the pinned head. */
function scoreWords(query, key, distance, pair) {
  const words = `Score at distance ${distance}: ${nats(scoreAt(pair, distance))} nats`;
  if (!state.pin) {
    return words;
  }
  const [layer, head] = state.pin;
  const other = pairOf(query, key, layer, head);
  return other ? `${words}; ${headName(layer, head)}: ${nats(scoreAt(other, distance))}` : words;
}

/** Draws a dial for each plane. */
function drawDials({ product, frequencies }, distance) {
  const { real, imaginary } = product;
  const lengths = frequencies.map((_, plane) => Math.hypot(real[plane], imaginary[plane]));
  const longest = Math.max(...lengths, 1e-9);
  const dials = frequencies.map((frequency, plane) => {
    const angle = Math.atan2(imaginary[plane], real[plane]) + frequency * distance;
    const reach = 16 * Math.sqrt(lengths[plane] / longest);
    return dial(reach * Math.cos(angle), -reach * Math.sin(angle), frequency);
  });
  $("dials").replaceChildren(...dials);
}

/** A dial. The hand is the product of query and key, rotated by the distance. */
function dial(x, y, frequency) {
  const side = x >= 0 ? "toward" : "away";
  const face = drawing(
    "svg",
    { viewBox: "-19 -19 38 38", width: 36, height: 36 },
    drawing("circle", { r: 17 }),
    drawing("line", { x1: 0, y1: -17, x2: 0, y2: 17, class: "zero" }),
    drawing("line", { x1: 0, y1: 0, x2: x, y2: y, class: side }),
  );
  const words = document.createElement("span");
  words.textContent = wavelengthWords(frequency);
  const element = document.createElement("div");
  element.append(face, words);
  return element;
}

$("pair-query").addEventListener("change", ({ target }) => {
  choosePair(Number(target.value), null);
});
$("pair-key").addEventListener("change", ({ target }) => {
  choosePair(state.query, Number(target.value));
});
$("pair-against").addEventListener("change", ({ target: { value } }) => {
  state.against = value === "" ? null : Number(value);
  refresh();
});
$("pair-distance").addEventListener("input", ({ target }) => {
  state.key = keyOf(state.query);
  state.distance = Number(target.value);
  remember(false);
  for (const pane of panesOf("pair")) {
    showPair(pane.element, pane.layer, pane.head);
  }
});
