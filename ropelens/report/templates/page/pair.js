// One query and one key: the choice of the pair, and the push of each plane in words.
function tokensOf() {
  return page.excerpts[state.excerpt].tokens;
}

/** A token in an element, at a position of the excerpt. */
function code(position) {
  return codeOf(tokensOf()[position]);
}

function codeOf(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

/** A signed number of nats. `write` writes its size. */
function nats(value, write = twoDecimals) {
  return (value < 0 ? "−" : "+") + write(Math.abs(value));
}

function twoDecimals(size) {
  return size.toFixed(2);
}

function twoDigits(size) {
  return Number(size.toPrecision(2));
}

function sumOf(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

// ---- the choice

function chooseExcerpt(excerpt) {
  const { length } = page.excerpts[excerpt].tokens;
  const pair = { query: length - 1, key: null, against: null, distance: null, auto: true };
  Object.assign(state, { excerpt }, pair);
  state.query = firstQuery();
  listTokens();
  showTabs();
  remember(false);
  return refresh();
}

/** Chooses a pair. If this changes the tab, "back" returns to the old tab. */
function choosePair(query, key, tab = state.tab) {
  if (key > query) {
    return;
  }
  const step = tab !== state.tab;
  const against = state.against < query ? state.against : null;
  Object.assign(state, { query, key, against, distance: null, tab, auto: false });
  remember(step);
  showTabs();
  refresh();
}

const INDUCTION = 0.3; // smallest score of an induction head

/** For an induction head, the keys after earlier copies of the query's token. */
function keysAfterCopies(query) {
  const row = rowOf(state.layer, state.head);
  if (!page.columns.induction || !(numberAt("induction", row) >= INDUCTION)) {
    return [];
  }
  const tokens = tokensOf();
  const keys = [];
  for (let copy = 1; copy < query - 1; copy++) {
    if (tokens[copy] === tokens[query]) {
      keys.push(copy + 1);
    }
  }
  return keys;
}

/** The query of the pair that is shown first: the last one, or for an induction head the one that
 * attends most to a key after a copy. */
function firstQuery() {
  const weights = shownWeights(state.layer, state.head);
  let best = tokensOf().length - 1;
  let most = 0;
  for (let query = 0; query < tokensOf().length; query++) {
    for (const key of keysAfterCopies(query)) {
      if (weights[query][key] > most) {
        best = query;
        most = weights[query][key];
      }
    }
  }
  return best;
}

/** The chosen key, or the key with most attention except position 0, after a copy if the head
 * copies. */
function keyOf(query) {
  if (state.key !== null && state.key <= query) {
    return state.key;
  }
  const weights = shownWeights(state.layer, state.head)[query];
  const copies = keysAfterCopies(query);
  let best = copies[0] ?? Math.min(1, query);
  for (let key = best; key <= query; key++) {
    const allowed = !copies.length || copies.includes(key);
    if (allowed && weights[key] > weights[best]) {
      best = key;
    }
  }
  return best;
}

// ---- pushes

/** A pair: its product in each plane, and the mean term of each plane for its rivals. The rivals
 * are the other keys of the row, weighted by their attention, or one chosen key. NaN if the row has
 * no other key; null if the head has no queries and keys. */
function pairOf(query, key, layer = state.layer, head = state.head) {
  if (!page.live[layer][head]) {
    return null;
  }
  const frequencies = turning(layer, state.band);
  const productOf = (other) => products(state.excerpt, layer, head, query, other);
  const termsOf = (other) => terms(productOf(other), frequencies, query - other);
  const weights = rivalWeights(query, key, shownWeights(layer, head)[query]);
  const sum = sumOf([...weights.values()]);
  const others = termsOf(key).fill(sum > 0 ? 0 : NaN);
  for (const [other, weight] of weights) {
    termsOf(other).forEach((term, plane) => {
      others[plane] += (weight / sum) * term;
    });
  }
  return { product: productOf(key), frequencies, others };
}

/** The weight of each rival of a key. */
function rivalWeights(query, key, row) {
  const weights = new Map();
  for (let other = 0; other <= query; other++) {
    if (other !== key && state.against === null) {
      weights.set(other, row[other]);
    } else if (other !== key && state.against === other) {
      weights.set(other, 1);
    }
  }
  return weights;
}

/** Push of each plane in nats: its term for the key minus its mean term for the rivals. */
function pushesOf({ product, frequencies, others }, distance) {
  const ofKey = terms(product, frequencies, distance);
  return ofKey.map((term, plane) => term - others[plane]);
}

/** Describes the weight of a pair, its push and the planes that push most. */
function describePair(query, key) {
  if (key === null || key > query) {
    return;
  }
  const weight = shownWeights(state.layer, state.head)[query][key];
  const share = `${(100 * weight).toFixed(1)}%`;
  const attended = [
    code(query),
    ` gives ${share} of its attention to `,
    code(key),
    ` (offset ${query - key})`,
  ];
  const pair = pairOf(query, key);
  const pushes = pair ? pushesOf(pair, query - key) : [];
  const pushed = pushes.some(Number.isFinite) ? pushWords(query, pushes) : [];
  $("pair-pushes").replaceChildren();
  if (pushed.length) {
    drawPushes(pushes);
  }
  $("pair-words").replaceChildren(...attended, ...pushed, ".");
}

function pushWords(query, pushes) {
  const { against } = state;
  const rivals =
    against === null ? ["the other keys"] : [code(against), ` (offset ${query - against})`];
  const sum = nats(sumOf(pushes));
  const largest = largestPushes(pushes, twoDecimals);
  return [
    ". The push on this key, compared with ",
    ...rivals,
    `, is ${sum} nats. The largest pushes are ${largest}`,
  ];
}

const NAMED_PUSHES = 3;

/** Lists the largest pushes of the chosen head. */
function largestPushes(pushes, write) {
  const planes = [...pushes.keys()].filter((plane) => pushes[plane] !== 0);
  planes.sort((a, b) => Math.abs(pushes[b]) - Math.abs(pushes[a]));
  const largest = planes.slice(0, NAMED_PUSHES);
  return largest.map((plane) => `${nats(pushes[plane], write)} ${originOf(plane)}`).join(", ");
}

/** Where a push comes from. */
function originOf(plane) {
  const { layer } = state;
  if (plane >= page.planes[layer]) {
    return "from unrotated coordinates";
  }
  return `from wavelength ${wavelengthWords(page.frequencies[layer][plane])}`;
}

/** Draws a bar for each plane, with the fastest plane first. A bar upward pushes toward the key. */
function drawPushes(pushes) {
  const most = Math.max(...pushes.map(Math.abs), 1e-9);
  const zero = 20;
  const width = 10 * pushes.length;
  const bars = pushes.map((push, plane) => {
    const height = (18 * Math.abs(push)) / most;
    return drawing("rect", {
      x: 10 * plane + 1,
      y: push > 0 ? zero - height : zero,
      width: 8,
      height: Math.max(height, 0.3),
      class: push > 0 ? "toward" : "away",
    });
  });
  const axis = drawing("line", { x1: 0, y1: zero, x2: width, y2: zero, class: "zero" });
  const size = { viewBox: `0 0 ${width} 40`, width: "100%", height: 40 };
  $("pair-pushes").append(drawing("svg", { ...size, preserveAspectRatio: "none" }, axis, ...bars));
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing. */
function drawing(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) {
    element.setAttribute(attribute, value);
  }
  element.append(...children);
  return element;
}

// ---- the effect on the next token

/** Gradient of the lead of the next token with respect to the score of a pair; NaN if planes are
 * stopped. The cells of the gradient are ordered by key. */
function slopeOf(query, key, layer, head) {
  const excerpt = page.excerpts[state.excerpt];
  const { lead } = excerpt;
  if (!lead || state.band) {
    return NaN;
  }
  const cells = lead.steps.shape[1];
  const cell = (key * (2 * excerpt.tokens.length - key - 1)) / 2 + query;
  const step = decode(lead.steps)[cells * excerpt.query.place[layer][head] + cell] - 127;
  return Math.sign(step) * lead.largest * (step / 127) ** 2;
}

const LEAST_EFFECT = 5e-4; // nats; smaller effects count as none

/** Describes the effect of the push of a pair on the next token. */
function leadWords(query, key, pair) {
  if (!pair) {
    return [];
  }
  const slope = slopeOf(query, key, state.layer, state.head);
  const effects = pushesOf(pair, query - key).map((push) => slope * push);
  if (!effects.some(Number.isFinite)) {
    return [];
  }
  const { lead } = page.excerpts[state.excerpt];
  const [first, second] = lead.words.map(codeOf);
  const most = Math.max(...effects.map(Math.abs));
  const sum = nats(sumOf(effects), twoDigits);
  const largest = largestPushes(effects, twoDigits);
  const effect =
    most < LEAST_EFFECT ? "nothing to this lead." : `${sum} nats to this lead: ${largest}.`;
  return [
    "The model's next token is ",
    first,
    `, ${lead.nats.toFixed(2)} nats ahead of `,
    second,
    ". To first order, the push on this pair adds ",
    effect,
  ];
}
