// The payload of the page and its arrays. Each array is decoded once, at its first use.
const [page, packedArrays] = await unpackPayload();

function $(id) {
  return document.getElementById(id);
}

function option(value, text) {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  return element;
}

const ARRAY_TYPES = { uint8: Uint8Array, int16: Int16Array, float32: Float32Array };
const decodedArrays = new Map();

/** The numbers of a packed array, as a typed array. */
function decode(packed) {
  if (!decodedArrays.has(packed)) {
    decodedArrays.set(packed, unpackArray(packed));
  }
  return decodedArrays.get(packed);
}

function unpackArray(packed) {
  const ArrayType = ARRAY_TYPES[packed.dtype];
  const width = ArrayType.BYTES_PER_ELEMENT;
  const length = width * sizeOf(packed.shape);
  const stored = packedArrays.subarray(packed.data, packed.data + length);
  const ordered = new Uint8Array(length);
  let next = 0;
  for (let byte = 0; byte < width; byte++) {
    // The lowest bytes of all numbers are stored first.
    for (let at = byte; at < length; at += width) {
      ordered[at] = stored[next];
      next++;
    }
  }
  return new ArrayType(ordered.buffer);
}

/** Number of elements of an array with this shape. */
function sizeOf(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** The part of a packed array at an `index`, which has a number for each leading dimension. */
function part(packed, index) {
  const size = sizeOf(packed.shape.slice(packed.dims.length));
  let start = 0;
  packed.dims.forEach((dim, i) => {
    start = start * packed.shape[i] + index[dim];
  });
  return decode(packed).subarray(size * start, size * (start + 1));
}
