// The payload and its arrays. Each array is decoded once, at its first use.
// `model` is the model of the page (`page`) or the model that is compared with it (`page.beside`).
const [page, packedArrays] = await unpackPayload();
const { layer: layers, head: heads, kv_head: kvHeads } = page.sizes;
const $ = (id) => document.getElementById(id);
const option = (value, textContent) => Object.assign(document.createElement("option"), { value, textContent });

const TYPES = { uint8: Uint8Array, int16: Int16Array, float32: Float32Array };
const decoded = new Map();
function decode(packed) {
  if (!decoded.has(packed)) {
    const type = TYPES[packed.dtype], size = type.BYTES_PER_ELEMENT, count = packed.shape.reduce((a, b) => a * b, 1);
    const bytes = packedArrays.subarray(packed.data, packed.data + count * size);
    const ordered = new Uint8Array(bytes.length);  // stored: the lowest bytes of all numbers first
    for (let at = 0, next = 0; at < size; at++) for (let i = at; i < bytes.length; i += size) ordered[i] = bytes[next++];
    decoded.set(packed, new type(ordered.buffer));
  }
  return decoded.get(packed);
}

/** The part of an array that belongs to a head. The leading dims are layer and (kv_)head. */
function part(packed, layer, head, model = page) {
  const index = { layer, head, kv_head: model.kvHeads[layer][head] };
  const size = packed.shape.slice(packed.dims.length).reduce((a, b) => a * b, 1);
  const start = size * packed.dims.reduce((flat, dim, i) => flat * packed.shape[i] + index[dim], 0);
  return decode(packed).subarray(start, start + size);
}

const rowOf = (layer, head) => page.rows[layer][head];
const places = page.rows.flatMap((row, layer) =>
  row.map((index, head) => [index, layer, head])).filter(([index]) => index >= 0)
  .sort(([a], [b]) => a - b).map(([, layer, head]) => [layer, head]);
const shares = (row, model = page) => [...decode(model.shares).subarray(5 * row, 5 * row + 5)];
const number = (column, row, model = page) => decode(model.columns[column])[row];
