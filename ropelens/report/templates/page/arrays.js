// The payload, and its arrays as typed arrays: each is unpacked once, when first asked for.
// `model` is the page's own, which the payload is of, or `page.beside`, another one.
const [page, packedArrays] = await unpackPayload();
const { layer: layers, head: heads, kv_head: kvHeads } = page.sizes;
const $ = (id) => document.getElementById(id);
/** An option of a menu. */
const option = (value, textContent) => Object.assign(document.createElement("option"), { value, textContent });

const TYPES = { uint8: Uint8Array, int16: Int16Array, float32: Float32Array };
const decoded = new Map();
function decode(packed) {
  if (!decoded.has(packed)) {
    const type = TYPES[packed.dtype], size = type.BYTES_PER_ELEMENT, count = packed.shape.reduce((a, b) => a * b, 1);
    const bytes = packedArrays.subarray(packed.data, packed.data + count * size);
    const ordered = new Uint8Array(bytes.length);  // the lowest bytes of all numbers come first
    for (let at = 0, next = 0; at < size; at++) for (let i = at; i < bytes.length; i += size) ordered[i] = bytes[next++];
    decoded.set(packed, new type(ordered.buffer));
  }
  return decoded.get(packed);
}

/** The part of an array that belongs to a head: its leading dims are layer and (kv_)head. */
function part(packed, layer, head, model = page) {
  const index = { layer, head, kv_head: model.kvHeads[layer][head] };
  const size = packed.shape.slice(packed.dims.length).reduce((a, b) => a * b, 1);
  const at = packed.dims.reduce((flat, dim, i) => flat * packed.shape[i] + index[dim], 0);
  return decode(packed).subarray(at * size, (at + 1) * size);
}

const rowOf = (layer, head) => page.rows[layer][head];
const places = page.rows.flatMap((row, layer) =>
  row.map((at, head) => [at, layer, head])).filter(([at]) => at >= 0)
  .sort(([a], [b]) => a - b).map(([, layer, head]) => [layer, head]);
const shares = (row, model = page) => [...decode(model.shares).subarray(4 * row, 4 * row + 4)];
const number = (column, row, model = page) => decode(model.columns[column])[row];
