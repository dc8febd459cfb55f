// Computes the scores of each plane and the attention of a head on an excerpt from its queries and
// keys, also if some planes stop rotating, are removed or are scaled. A band {from, to, mode} is a range
// of planes, counted from the fastest plane; null is the unmodified head.

/** Indices of the heads whose weights are stored, because they do not follow from queries and keys. */
const given = new Map([page, page.beside].filter(Boolean).map((model) => {
  let givens = 0;
  return [model, model.live.map((row) => row.map((live) => (live ? -1 : givens++)))];
}));

/** Weights [query][key] of an unmodified head; NaN if the key is after the query. */
function unmodifiedWeights(excerpt, layer, head, model = page) {
  if (model.live[layer][head]) return attend(excerpt, layer, head, null, model);
  const { tokens, attention } = model.excerpts[excerpt], [steps, root] = model.coding;
  const cells = attention.shape[1], bytes = decode(attention);
  let next = cells * given.get(model)[layer][head];
  const rows = tokens.map(() => new Float32Array(tokens.length).fill(NaN));
  for (let key = 0; key < tokens.length; key++) {
    for (let query = key; query < tokens.length; query++) rows[query][key] = (bytes[next++] / steps) ** root;
  }
  return rows;
}

function vectors(side, layer, head) {
  const place = side.place[layer][head];
  const [, size, count] = side.steps.shape;
  const steps = decode(side.steps).subarray(place * count * size, (place + 1) * count * size);
  const step = decode(side.step).subarray(place * size, (place + 1) * size);
  return { size, at: (position) => Float64Array.from({ length: size }, (_, i) => {
    const coded = steps[i * count + position];  // with zigzag: 0, -1, 1, -2, ...
    return step[i] * (side.zigzag ? ((coded & 0xffff) >>> 1) ^ -(coded & 1) : coded);
  }) };
}

const inBand = (band, plane) => band && band.from <= plane && plane <= band.to;

/** Frequency of each plane in rad/token: 0 if it stops rotating. */
function turning(layer, band, model = page) {
  return model.frequencies[layer].slice(0, model.planes[layer]).map((frequency, plane) =>
    band?.mode === "stop" && inBand(band, plane) ? 0 : frequency);
}

/** Factor on what a plane adds to the scores: 0 if it is removed. */
const gain = (band, plane) => inBand(band, plane) ? { stop: 1, drop: 0, scale: state.factor }[band.mode] : 1;

/** Product of a query and a key in each plane, and a list with the term of unrotated coordinates. */
function products(excerpt, layer, head, query, key, model) {
  const one = model.excerpts[excerpt];
  const q = vectors(one.query, layer, head), k = vectors(one.key, layer, model.kvHeads[layer][head]);
  const [a, b] = [q.at(query), k.at(key)], count = model.planes[layer];
  const scale = model.scale[layer], band = bandOf(layer, model);
  let rest = 0;
  for (let i = 2 * count; i < q.size; i++) rest += a[i] * b[i];
  const real = [], imaginary = [];
  for (let plane = 0; plane < count; plane++) {
    const size = scale * gain(band, plane);
    real.push(size * (a[plane] * b[plane] + a[count + plane] * b[count + plane]));
    imaginary.push(size * (a[count + plane] * b[plane] - a[plane] * b[count + plane]));
  }
  return { real, imaginary, rest: q.size > 2 * count ? [scale * rest] : [] };
}

/** What each plane adds to the score at this distance, in nats. The last term is for unrotated coordinates, if any. */
function terms({ real, imaginary, rest }, frequencies, distance) {
  const rotated = frequencies.map((frequency, plane) =>
    real[plane] * Math.cos(frequency * distance) - imaginary[plane] * Math.sin(frequency * distance));
  return [...rotated, ...rest];
}

/** Weights [query][key] of a head from its queries and keys; NaN if the key is after the query. */
function attend(excerpt, layer, head, band, model = page) {
  const one = model.excerpts[excerpt], count = model.planes[layer], length = one.tokens.length;
  const q = vectors(one.query, layer, head), k = vectors(one.key, layer, model.kvHeads[layer][head]);
  const scale = model.scale[layer];
  const turned = turning(layer, band, model);
  /** Every vector, rotated to its position, so that a score is one product. */
  const placed = (side, factor) => Array.from({ length }, (_, position) => {
    const still = side.at(position), made = new Float64Array(side.size);
    for (let i = 2 * count; i < side.size; i++) made[i] = still[i];
    for (let plane = 0; plane < count; plane++) {
      const angle = turned[plane] * position, [cos, sin] = [Math.cos(angle), Math.sin(angle)].map((x) => factor(plane) * x);
      made[plane] = still[plane] * cos - still[count + plane] * sin;
      made[count + plane] = still[plane] * sin + still[count + plane] * cos;
    }
    return made;
  });
  const queries = placed(q, (plane) => gain(band, plane)), keys = placed(k, () => 1);
  return queries.map((from, query) => {
    const row = new Float32Array(length).fill(NaN);
    let highest = -Infinity, sum = 0;
    for (let key = 0; key <= query; key++) {
      let score = 0;
      for (let i = 0; i < q.size; i++) score += from[i] * keys[key][i];
      row[key] = scale * score;
      highest = Math.max(highest, row[key]);
    }
    for (let key = 0; key <= query; key++) sum += row[key] = Math.exp(row[key] - highest);
    for (let key = 0; key <= query; key++) row[key] /= sum;
    return row;
  });
}

/** Mean weight at each distance, over the queries that see this distance. */
function byDistance(weights) {
  return weights.map((_, distance) => {
    let sum = 0;
    for (let query = distance; query < weights.length; query++) sum += weights[query][query - distance];
    return sum / (weights.length - distance);
  });
}
