/** Decodes LZMA, which packs scripts by a fifth more than gzip does, and which browsers lack. */

const HEADER = 13; // bytes: properties, size of the dictionary, size of the contents
const CHANCES = 2048; // the sum of both chances of a bit
const SPEED = 5; // a chance moves by 1/32 of its distance
const STATES = 12;
const SHORTEST = 2; // bytes of a match
const LITERAL = 0x300; // chances for one previous byte
const FIRST_ALIGNED = 14; // a distance from this slot on ends with aligned bits

/** Reads bits whose chances are learned. */
class Bits {
  constructor(bytes, at) {
    this.bytes = bytes;
    this.at = at + 5;
    this.range = 0xffffffff;
    this.code = new DataView(bytes.buffer, bytes.byteOffset).getUint32(at + 1);
  }

  refill() {
    if (this.range < 0x1000000) {
      this.range = (this.range << 8) >>> 0;
      this.code = ((this.code << 8) | this.bytes[this.at]) >>> 0;
      this.at++;
    }
  }

  /** A bit that is 0 with the chance at `index`. */
  one(chances, index) {
    const chance = chances[index];
    const bound = (this.range >>> 11) * chance;
    const isSet = this.code >= bound;
    if (isSet) {
      this.range = this.range - bound;
      this.code = this.code - bound;
      chances[index] -= chance >> SPEED;
    } else {
      this.range = bound;
      chances[index] += (CHANCES - chance) >> SPEED;
    }
    this.refill();
    return isSet ? 1 : 0;
  }

  /** `count` bits with even chances. */
  even(count) {
    let value = 0;
    for (let bit = 0; bit < count; bit++) {
      this.range >>>= 1;
      const isSet = this.code >= this.range;
      if (isSet) {
        this.code -= this.range;
      }
      value = 2 * value + (isSet ? 1 : 0);
      this.refill();
    }
    return value;
  }

  /** `count` bits, the highest first, whose chances depend on the bits before. */
  tree(chances, count, first = 0) {
    let node = 1;
    for (let bit = 0; bit < count; bit++) {
      node = 2 * node + this.one(chances, first + node);
    }
    return node - (1 << count);
  }

  /** The same with the lowest bit first. */
  reversed(chances, count, first = 0) {
    let node = 1;
    let value = 0;
    for (let bit = 0; bit < count; bit++) {
      const isSet = this.one(chances, first + node);
      node = 2 * node + isSet;
      value |= isSet << bit;
    }
    return value;
  }
}

function evenChances(count) {
  return new Uint16Array(count).fill(CHANCES / 2);
}

/** Reads lengths of matches. */
class Lengths {
  constructor() {
    this.choice = evenChances(2);
    this.low = evenChances(16 << 3);
    this.middle = evenChances(16 << 3);
    this.high = evenChances(1 << 8);
  }

  read(bits, place) {
    if (!bits.one(this.choice, 0)) {
      return SHORTEST + bits.tree(this.low, 3, place << 3);
    }
    if (!bits.one(this.choice, 1)) {
      return SHORTEST + 8 + bits.tree(this.middle, 3, place << 3);
    }
    return SHORTEST + 16 + bits.tree(this.high, 8);
  }
}

/** Reads distances of matches. */
class Distances {
  constructor() {
    this.slots = evenChances(4 << 6);
    this.special = evenChances(128);
    this.aligned = evenChances(16);
  }

  read(bits, length) {
    const slot = bits.tree(this.slots, 6, Math.min(length - SHORTEST, 3) << 6);
    if (slot < 4) {
      return slot;
    }
    const count = (slot >> 1) - 1;
    const first = ((2 | (slot & 1)) << count) >>> 0;
    if (slot < FIRST_ALIGNED) {
      return first + bits.reversed(this.special, count, first - slot);
    }
    const upper = bits.even(count - 4) * 16;
    return first + upper + bits.reversed(this.aligned, 4);
  }
}

/** The contents of a file in the format "lzma alone" whose header has their size. */
function unpackLzma(bytes) {
  const properties = bytes[0];
  const byBefore = properties % 9; // upper bits of the byte before that a literal depends on
  const byPlace = Math.floor(properties / 9) % 5; // lower bits of the place, likewise
  const placeMask = (1 << Math.floor(properties / 45)) - 1;
  const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(5, true);
  const out = new Uint8Array(size);
  const bits = new Bits(bytes, HEADER);
  const literals = evenChances(LITERAL << (byBefore + byPlace));
  const isMatch = evenChances(STATES << 4);
  const isRepeat = evenChances(STATES);
  const isOlder = evenChances(STATES);
  const isLong = evenChances(STATES << 4);
  const isSecond = evenChances(STATES);
  const isThird = evenChances(STATES);
  const lengths = new Lengths();
  const repeatLengths = new Lengths();
  const distances = new Distances();
  const recent = [0, 0, 0, 0];
  let state = 0;
  let at = 0;

  function readLiteral() {
    const before = at > 0 ? out[at - 1] : 0;
    const place = (at & ((1 << byPlace) - 1)) << byBefore;
    const first = LITERAL * (place + (before >> (8 - byBefore)));
    let node = 1;
    if (state >= 7) {
      let matched = out[at - recent[0] - 1];
      let agrees = true;
      while (agrees && node < 0x100) {
        const expected = (matched >> 7) & 1;
        matched <<= 1;
        const bit = bits.one(literals, first + ((1 + expected) << 8) + node);
        node = 2 * node + bit;
        agrees = bit === expected;
      }
    }
    while (node < 0x100) {
      node = 2 * node + bits.one(literals, first + node);
    }
    out[at] = node;
    at++;
    state = state < 4 ? 0 : state - (state < 10 ? 3 : 6);
  }

  /** Moves a recent distance to the front. */
  function repeatDistance() {
    let index = 1;
    if (bits.one(isSecond, state)) {
      index = 2 + bits.one(isThird, state);
    }
    const [distance] = recent.splice(index, 1);
    recent.unshift(distance);
  }

  /** The length of the next match; its distance is then the first of `recent`. */
  function readMatch(place) {
    if (!bits.one(isRepeat, state)) {
      const length = lengths.read(bits, place);
      recent.pop();
      recent.unshift(distances.read(bits, length));
      state = state < 7 ? 7 : 10;
      return length;
    }
    if (bits.one(isOlder, state)) {
      repeatDistance();
    } else if (!bits.one(isLong, (state << 4) + place)) {
      state = state < 7 ? 9 : 11;
      return 1;
    }
    const length = repeatLengths.read(bits, place);
    state = state < 7 ? 8 : 11;
    return length;
  }

  while (at < size) {
    const place = at & placeMask;
    if (!bits.one(isMatch, (state << 4) + place)) {
      readLiteral();
    } else {
      const length = readMatch(place);
      const end = Math.min(size, at + length);
      for (; at < end; at++) {
        out[at] = out[at - recent[0] - 1];
      }
    }
  }
  return out;
}
