// One query and one key: their text, the push of each plane, and the score at other distances.
const tokensOf = () => page.excerpts[state.excerpt].tokens;
const code = (i) => Object.assign(document.createElement("code"), { textContent: tokensOf()[i] });
const nats = (value, write = (size) => size.toFixed(2)) => (value < 0 ? "−" : "+") + write(Math.abs(value));
const roughly = (size) => Number(size.toPrecision(2));

function chooseExcerpt(excerpt) {
  const length = page.excerpts[excerpt].tokens.length;
  Object.assign(state, { excerpt, query: length - 1, key: null, against: null, distance: null, auto: true });
  state.query = firstQuery();
  listTokens();
  showTabs();
  remember(false);
  return refresh();
}

/** Chooses a pair. If this changes the tab, "back" returns to the old tab. */
function choosePair(query, key, tab = state.tab) {
  if (key > query) return;
  const step = tab !== state.tab;
  Object.assign(state, { query, key, against: state.against < query ? state.against : null, distance: null, tab, auto: false });
  remember(step);
  showTabs();
  refresh();
}

/** For an induction head, the keys after earlier copies of the query's token. */
const INDUCTION = 0.3;  // smallest score of an induction head
function keysAfterCopies(query, names = tokensOf()) {
  if (!page.columns.induction || !(number("induction", rowOf(state.layer, state.head)) >= INDUCTION)) return [];
  return names.slice(0, Math.max(0, query - 1)).flatMap((name, key) => key > 0 && name === names[query] ? [key + 1] : []);
}

/** The query of the pair that is shown first: the last one, or for an induction head the one that attends
    most to a key after a copy. */
function firstQuery() {
  const weights = shownWeights(state.layer, state.head);
  let [best, most] = [tokensOf().length - 1, 0];
  tokensOf().forEach((_, query) => keysAfterCopies(query).forEach((key) => {
    if (weights[query][key] > most) [best, most] = [query, weights[query][key]];
  }));
  return best;
}

/** The chosen key, or the key with most attention except position 0, after a copy if the head copies. */
function keyOf(query) {
  if (state.key !== null && state.key <= query) return state.key;
  const row = shownWeights(state.layer, state.head)[query], copies = keysAfterCopies(query);
  let best = copies[0] ?? Math.min(1, query);
  for (let key = best; key <= query; key++) if (row[key] > row[best] && (!copies.length || copies.includes(key))) best = key;
  return best;
}

/** A pair, and the mean term of each plane for its rivals. The rivals are the other keys of the row,
 * weighted by their attention, or one chosen key. NaN if the row has no other key. */
function pairOf(query, key, layer = state.layer, head = state.head, model = page) {
  if (!model.live[layer][head] || !sameTokens(model)) return null;
  const frequencies = turning(layer, bandOf(layer, model), model), row = shownWeights(layer, head, model)[query];
  const productOf = (other) => products(excerptOf(model), layer, head, query, other, model);
  const termsOf = (other) => terms(productOf(other), frequencies, query - other);
  const isRival = (other) => other !== key && other <= query && [null, other].includes(state.against);
  const rivals = [...row.keys()].filter(isRival), weight = (other) => state.against === null ? row[other] : 1;
  const sum = rivals.reduce((total, other) => total + weight(other), 0), others = termsOf(key).fill(sum > 0 ? 0 : NaN);
  for (const other of rivals) termsOf(other).forEach((term, plane) => { others[plane] += weight(other) / sum * term; });
  return { product: productOf(key), frequencies, others };
}

/** Push of each plane in nats: its term for the key minus its mean term for the rivals. */
const contrasts = ({ product, frequencies, others }, distance) =>
  terms(product, frequencies, distance).map((term, plane) => term - others[plane]);

/** Whether a model has read the chosen text with the same tokens. */
function sameTokens(model) {
  const tokens = model.excerpts[excerptOf(model)]?.tokens;
  return tokens?.length === tokensOf().length && tokens.every((token, i) => token === tokensOf()[i]);
}

/** Describes the weight of a pair, its push and the planes that push most. */
function describePair(query, key) {
  if (key === null || key > query) return;
  const weight = shownWeights(state.layer, state.head)[query][key];
  const words = [code(query), " gives ", `${(100 * weight).toFixed(1)}% of its attention to `, code(key), ` (offset ${query - key})`];
  const pair = pairOf(query, key);
  $("pair-pushes").replaceChildren();
  const pushes = pair ? contrasts(pair, query - key) : [];
  if (pushes.some(Number.isFinite)) {
    drawPushes(pushes);
    const rivals = state.against === null ? ["the other keys"] : [code(state.against), ` (offset ${query - state.against})`];
    words.push(". The push on this key, compared with ", ...rivals, `, is ${nats(pushes.reduce((a, b) => a + b, 0))} nats. `
      + `The largest pushes are ${largest(pushes)}`);
  }
  $("pair-words").replaceChildren(...words, ".");
}

/** Lists the three largest pushes of the chosen head. */
const largest = (pushes, write) => pushes.map((push, plane) => [push, plane]).filter(([push]) => push !== 0)
  .sort(([a], [b]) => Math.abs(b) - Math.abs(a)).slice(0, 3)
  .map(([push, plane]) => `${nats(push, write)} ${plane < page.planes[state.layer]
    ? `from wavelength ${span(page.frequencies[state.layer][plane])}` : "from unrotated coordinates"}`).join(", ");

/** Gradient of the lead of the next token with respect to the score of a pair; NaN if planes are stopped. */
function slopeOf(query, key, layer, head, model) {
  const { lead, tokens, query: { place } } = model.excerpts[excerptOf(model)];
  if (!lead || bandOf(layer, model)) return NaN;
  const cells = lead.steps.shape[1], cell = key * (2 * tokens.length - key - 1) / 2 + query;
  const step = decode(lead.steps)[cells * place[layer][head] + cell] - 127;
  return Math.sign(step) * lead.largest * (step / 127) ** 2;
}

/** Describes the effect of the push on the next token. */
function leadWords(query, key, pair) {
  const { lead } = page.excerpts[state.excerpt], slope = pair ? slopeOf(query, key, state.layer, state.head, page) : NaN;
  const parts = pair ? contrasts(pair, query - key).map((push) => slope * push) : [];
  if (!parts.some(Number.isFinite)) return [];
  const [first, second] = lead.words.map((textContent) => Object.assign(document.createElement("code"), { textContent }));
  const [least, sum] = [5e-4, parts.reduce((a, b) => a + b, 0)];
  return ["The model's next token is ", first, `, ${lead.nats.toFixed(2)} nats ahead of `, second, ". To first order, the push on this pair adds ",
    ...(Math.max(...parts.map(Math.abs)) < least ? ["nothing to this lead."] : [`${nats(sum, roughly)} nats to this lead: ${largest(parts, roughly)}.`])];
}

/** Draws a bar for each plane, with the fastest plane first. A bar upward pushes toward the key. */
function drawPushes(pushes) {
  const most = Math.max(...pushes.map(Math.abs), 1e-9), zero = 20;
  const bars = pushes.map((push, plane) => {
    const tall = 18 * Math.abs(push) / most;
    return drawing("rect", { x: 10 * plane + 1, y: push > 0 ? zero - tall : zero, width: 8, height: Math.max(tall, 0.3),
      class: push > 0 ? "toward" : "away" });
  });
  const wide = 10 * pushes.length;
  $("pair-pushes").append(drawing("svg", { viewBox: `0 0 ${wide} 40`, preserveAspectRatio: "none", width: "100%", height: 40 },
    drawing("line", { x1: 0, y1: zero, x2: wide, y2: zero, class: "zero" }), ...bars));
}

// ---- the excerpt as text

let tokens = [];
function listTokens() {
  if (tokens.excerpt === state.excerpt) return;
  $("pick-excerpt").value = state.excerpt;
  tokens = tokensOf().map((token, i) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: token, tabIndex: -1 });
    button.addEventListener("click", () => choosePair(i, null));
    button.addEventListener("keydown", ({ key }) => {
      const next = tokens[i + ({ ArrowRight: 1, ArrowLeft: -1 }[key] ?? NaN)];
      next?.focus();
      next?.click();
    });
    return button;
  });
  tokens.excerpt = state.excerpt;
  $("tokens").replaceChildren(...tokens);
  for (const id of ["pair-query", "pair-key"]) {
    $(id).replaceChildren(...tokensOf().map((token, at) => option(at, `${at}: ${token}`)));
  }
  $("pair-against").replaceChildren(option("", "all other keys"), ...tokensOf().map((token, at) => option(at, `${at}: ${token}`)));
}

function showText() {
  const { query } = state;
  const row = shownWeights(state.layer, state.head)[query];
  const color = page.colors[page.labels[rowOf(state.layer, state.head)]];
  tokens.forEach((button, i) => {
    const shade = Math.round(70 * Math.sqrt(row[i] || 0));
    button.style.background = `color-mix(in srgb, ${color} ${shade}%, transparent)`;
    button.classList.toggle("ahead", i > query);
    button.setAttribute("aria-pressed", i === query);
    button.tabIndex = i === query ? 0 : -1;
  });
  $("looks").replaceChildren(...lookWords(query, row));
  const beside = besideHead();
  $("looks-beside").replaceChildren(...!beside ? [] : !sameTokens(beside.model) ? [`${nameOf(beside)} did not read these tokens.`]
    : [`${nameOf(beside)}: `, ...lookWords(query, shownWeights(beside.layer, beside.head, beside.model)[query])]);
}

/** Lists the keys with most attention of a query. */
function lookWords(query, row) {
  const best = [...row.keys()].filter((i) => row[i] >= 0.005).sort((a, b) => row[b] - row[a]).slice(0, 4);
  const parts = best.flatMap((i, n) => {
    const back = i === query ? "itself" : i === 0 ? "first" : `${query - i} back`;
    return [n ? ", " : "", code(i), ` ${Math.round(100 * row[i])}% (${back})`];
  });
  return [code(query), " attends to ", ...(parts.length ? parts : ["no key in particular"]), "."];
}

// ---- planes of the pair

/** Shows the controls, dials and figure of the pair. */
function showPair(element, layer, head, model) {
  const { query } = state, key = keyOf(query), distance = state.distance ?? query - key;
  const pair = pairOf(query, key, layer, head, model);
  if (element === plot("pair")) showControls(query, key, distance, pair);
  const role = (name) => element.data.findIndex(({ meta }) => meta?.role === name);
  const at = [role("push"), role("score"), role("here")];
  if (!pair) return Plotly.restyle(element, { x: [[], [], []], y: [[], [], []] }, at);
  const pushes = contrasts(pair, distance);
  const own = part(model.arrays.wavelength_position, layer, 0, model);
  const shown = pushes.slice(0, own.findLastIndex(Number.isFinite) + 1);
  const score = Array.from({ length: Math.max(page.farthest[state.layer], distance) + 1 }, (_, d) => scoreAt(pair, d));
  const slope = distance === query - key ? slopeOf(query, key, layer, head, model) : NaN;
  const hovers = shown.map((push, plane) => {
    const frequency = model.frequencies[layer][plane];
    return [frequency > 0 ? 2 * Math.PI / frequency : Infinity, Number.isFinite(slope) ? `<br>${nats(slope * push, roughly)} nats in the lead of the next token` : ""];
  });
  return Plotly.restyle(element, { x: [own.slice(0, shown.length), score.map((_, d) => d), [distance]],
    y: [shown, score, [score[distance]]], customdata: [hovers, null, null], width: [own.map((x) => 0.3 * x), null, null] }, at);
}

/** Score of a pair at another distance. */
const scoreAt = ({ product, frequencies }, distance) => terms(product, frequencies, distance).reduce((a, b) => a + b, 0);

function showControls(query, key, distance, pair) {
  $("pair-query").value = query;
  $("pair-key").value = key;
  $("pair-against").value = state.against ?? "";
  [...$("pair-key").options].forEach((option, i) => { option.disabled = i > query; });
  [...$("pair-against").options].forEach((option, i) => { option.disabled = i > query + 1 || i === key + 1; });
  $("pair-distance").max = page.farthest[state.layer];
  $("pair-distance").value = distance;
  $("pair-distance").disabled = !pair;
  if (pair) drawDials(pair, distance);
  else $("dials").replaceChildren();
  $("pair-lead").replaceChildren(...leadWords(query, key, pair));
  const beside = besideHead(), other = beside && pairOf(query, key, beside.layer, beside.head, beside.model);
  $("pair-score").textContent = !pair ? NOT_LIVE
    : `Score at distance ${distance}: ${nats(scoreAt(pair, distance))} nats${other ? `; ${nameOf(beside)}: ${nats(scoreAt(other, distance))}` : ""}`;
}

const SVG = "http://www.w3.org/2000/svg";
function drawing(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Draws a dial for each plane. The hand is the product of query and key, rotated by the distance. */
function drawDials({ product, frequencies }, distance) {
  const lengths = frequencies.map((_, plane) => Math.hypot(product.real[plane], product.imaginary[plane]));
  const longest = Math.max(...lengths, 1e-9);
  $("dials").replaceChildren(...frequencies.map((frequency, plane) => {
    const angle = Math.atan2(product.imaginary[plane], product.real[plane]) + frequency * distance;
    const reach = 16 * Math.sqrt(lengths[plane] / longest), [x, y] = [reach * Math.cos(angle), -reach * Math.sin(angle)];
    const hand = drawing("line", { x1: 0, y1: 0, x2: x, y2: y, class: x >= 0 ? "toward" : "away" });
    const face = drawing("svg", { viewBox: "-19 -19 38 38", width: 36, height: 36 },
      drawing("circle", { r: 17 }), drawing("line", { x1: 0, y1: -17, x2: 0, y2: 17, class: "zero" }), hand);
    const words = Object.assign(document.createElement("span"), { textContent: span(frequency) });
    const dial = document.createElement("div");
    dial.append(face, words);
    return dial;
  }));
}

$("pair-query").addEventListener("change", ({ target: { value } }) => choosePair(Number(value), null));
$("pair-key").addEventListener("change", ({ target: { value } }) => choosePair(state.query, Number(value)));
$("pair-against").addEventListener("change", ({ target: { value } }) => {
  state.against = value === "" ? null : Number(value);
  refresh();
});
$("pair-distance").addEventListener("input", ({ target: { value } }) => {
  state.key = keyOf(state.query);
  state.distance = Number(value);
  remember(false);
  for (const [element, { layer, head, model }] of panesOf("pair")) showPair(element, layer, head, model);
});
