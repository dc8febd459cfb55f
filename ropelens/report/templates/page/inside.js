// Computes the scores of each plane and the attention of a head on an excerpt from its queries and
// keys, also if some planes stop rotating, are removed or are scaled. `band` is null for the
// unmodified head.

/** Indices of the heads with stored weights, which do not follow from queries and keys; else -1. */
const storedHeads = numberStoredHeads();

function numberStoredHeads() {
  let count = 0;
  const indices = [];
  for (const ofLayer of page.live) {
    const row = [];
    for (const live of ofLayer) {
      row.push(live ? -1 : count);
      count += live ? 0 : 1;
    }
    indices.push(row);
  }
  return indices;
}

/** Rows [query][key] of NaN for the weights of an excerpt. */
function emptyWeights(length) {
  return Array.from({ length }, () => new Float32Array(length).fill(NaN));
}

/** Weights [query][key] of an unmodified head; NaN if the key is after the query. */
function unmodifiedWeights(excerpt, layer, head) {
  if (page.live[layer][head]) {
    return attend(excerpt, layer, head, null);
  }
  const { tokens, attention } = page.excerpts[excerpt];
  const [steps, root] = page.coding;
  const bytes = decode(attention);
  const weights = emptyWeights(tokens.length);
  let next = attention.shape[1] * storedHeads[layer][head];
  for (let key = 0; key < tokens.length; key++) {
    for (let query = key; query < tokens.length; query++) {
      weights[query][key] = (bytes[next] / steps) ** root;
      next++;
    }
  }
  return weights;
}

/** Number of a step; with zigzag, the steps 0, -1, 1, -2, ... are coded as 0, 1, 2, 3, ... */
function uncoded(step, zigzag) {
  return zigzag ? ((step & 0xffff) >>> 1) ^ -(step & 1) : step;
}

/** Queries or keys of a head, by position. */
function vectorsOf(side, layer, head) {
  const place = side.place[layer][head];
  const [, size, count] = side.steps.shape;
  const steps = decode(side.steps).subarray(place * count * size, (place + 1) * count * size);
  const stepSizes = decode(side.step).subarray(place * size, (place + 1) * size);
  const at = (position) => {
    const vector = new Float64Array(size);
    for (let i = 0; i < size; i++) {
      vector[i] = stepSizes[i] * uncoded(steps[i * count + position], side.zigzag);
    }
    return vector;
  };
  return { at };
}

function queriesOf(excerpt, layer, head) {
  return vectorsOf(page.excerpts[excerpt].query, layer, head);
}

function keysOf(excerpt, layer, head) {
  return vectorsOf(page.excerpts[excerpt].key, layer, page.kvHeads[layer][head]);
}

function inBand(band, plane) {
  return band !== null && band.from <= plane && plane <= band.to;
}

/** Frequency of each plane in rad/token: 0 if it stops rotating. */
function turning(layer, band) {
  const frequencies = page.frequencies[layer].slice(0, page.planes[layer]);
  return frequencies.map((frequency, plane) => {
    const stops = inBand(band, plane) && band.mode === "stop";
    return stops ? 0 : frequency;
  });
}

/** Factor on what a plane adds to the scores: 0 if it is removed. */
function gain(band, plane) {
  if (!inBand(band, plane)) {
    return 1;
  }
  return { stop: 1, drop: 0, scale: state.factor }[band.mode];
}

/** Product of a query and a key in each plane, and a list with the term of unrotated coordinates.
 * The list is empty if all coordinates rotate. */
function products(excerpt, layer, head, query, key) {
  const q = queriesOf(excerpt, layer, head).at(query);
  const k = keysOf(excerpt, layer, head).at(key);
  const count = page.planes[layer];
  const scale = page.scale[layer];
  const real = [];
  const imaginary = [];
  for (let plane = 0; plane < count; plane++) {
    const size = scale * gain(state.band, plane);
    const other = count + plane;
    real.push(size * (q[plane] * k[plane] + q[other] * k[other]));
    imaginary.push(size * (q[other] * k[plane] - q[plane] * k[other]));
  }
  let unrotated = 0;
  for (let i = 2 * count; i < q.length; i++) {
    unrotated += q[i] * k[i];
  }
  return { real, imaginary, rest: q.length > 2 * count ? [scale * unrotated] : [] };
}

/** What each plane adds to the score at this distance, in nats. The last term is for unrotated
 * coordinates, if there are any. */
function terms({ real, imaginary, rest }, frequencies, distance) {
  const rotated = frequencies.map((frequency, plane) => {
    const angle = frequency * distance;
    return real[plane] * Math.cos(angle) - imaginary[plane] * Math.sin(angle);
  });
  return [...rotated, ...rest];
}

/** Vectors that are rotated to their positions, so that a score is one product. `factors` has a
 * factor for each plane. */
function rotatedVectors(vectors, length, frequencies, factors) {
  const count = frequencies.length;
  return Array.from({ length }, (_, position) => {
    const vector = vectors.at(position);
    const rotated = Float64Array.from(vector);
    for (let plane = 0; plane < count; plane++) {
      const angle = frequencies[plane] * position;
      const cosine = factors[plane] * Math.cos(angle);
      const sine = factors[plane] * Math.sin(angle);
      const other = count + plane;
      rotated[plane] = vector[plane] * cosine - vector[other] * sine;
      rotated[other] = vector[plane] * sine + vector[other] * cosine;
    }
    return rotated;
  });
}

/** Weights [query][key] of a head from its queries and keys; NaN if the key is after the query. */
function attend(excerpt, layer, head, band) {
  const { length } = page.excerpts[excerpt].tokens;
  const frequencies = turning(layer, band);
  const gains = frequencies.map((_, plane) => gain(band, plane));
  const ones = frequencies.map(() => 1);
  const still = { queries: queriesOf(excerpt, layer, head), keys: keysOf(excerpt, layer, head) };
  const queries = rotatedVectors(still.queries, length, frequencies, gains);
  const keys = rotatedVectors(still.keys, length, frequencies, ones);
  const weights = emptyWeights(length);
  for (let query = 0; query < length; query++) {
    for (let key = 0; key <= query; key++) {
      weights[query][key] = page.scale[layer] * product(queries[query], keys[key]);
    }
    softmax(weights[query].subarray(0, query + 1));
  }
  return weights;
}

function product(query, key) {
  let sum = 0;
  for (let i = 0; i < query.length; i++) {
    sum += query[i] * key[i];
  }
  return sum;
}

/** Turns scores into weights, in place. */
function softmax(scores) {
  const highest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
  let sum = 0;
  for (let i = 0; i < scores.length; i++) {
    const weight = Math.exp(scores[i] - highest);
    scores[i] = weight;
    sum += weight;
  }
  for (let i = 0; i < scores.length; i++) {
    scores[i] /= sum;
  }
}

/** Mean weight at each distance, over the queries that see this distance. */
function byDistance(weights) {
  return weights.map((_, distance) => {
    let sum = 0;
    for (let query = distance; query < weights.length; query++) {
      sum += weights[query][query - distance];
    }
    return sum / (weights.length - distance);
  });
}
