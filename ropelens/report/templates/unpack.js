"use strict";
document.documentElement.classList.add("scripted");

const DIGITS =
  "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;/=,?@^_`{|}~";
const LARGEST_DIGIT = DIGITS.length - 1;

/** Decodes base85: five digits are four bytes, and the last group may be shorter. */
function bytesOf(base85) {
  const digits = new Uint8Array(128);
  for (let digit = 0; digit <= LARGEST_DIGIT; digit++) {
    digits[DIGITS.charCodeAt(digit)] = digit;
  }
  const size = Math.floor((base85.length * 4) / 5);
  const bytes = new Uint8Array(size + 3);
  const view = new DataView(bytes.buffer);
  let next = 0;
  for (let at = 0; at < size; at += 4) {
    let word = 0;
    for (let place = 0; place < 5; place++) {
      const digit = next < base85.length ? digits[base85.charCodeAt(next)] : LARGEST_DIGIT;
      word = 85 * word + digit;
      next++;
    }
    view.setUint32(at, word);
  }
  return bytes.subarray(0, size);
}

/** The bytes in an element, as `decompress` reads them. If it fails, the page reports it and shows
 * its content for browsers without scripts, and the promise never resolves. */
async function unpack(id, decompress) {
  try {
    return await decompress(bytesOf(document.getElementById(id).textContent));
  } catch {
    showWithoutScript();
    return new Promise(() => {});
  }
}

async function unpackGzip(packed) {
  const unzip = new DecompressionStream("gzip");
  const stream = new Blob([packed]).stream().pipeThrough(unzip);
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function showWithoutScript() {
  document.documentElement.classList.remove("scripted");
  document
    .querySelector("header")
    .append(
      "The figures cannot be read, because this browser is too old or the file is damaged. " +
        "(ropelens report writes the file again.)",
    );
  for (const content of document.querySelectorAll("noscript")) {
    content.outerHTML = content.textContent;
  }
}

function textOf(bytes) {
  return new TextDecoder().decode(bytes);
}

/** The payload, and the bytes of its arrays after a zero byte. */
async function unpackPayload() {
  const whole = await unpack("payload", unpackGzip);
  const end = whole.indexOf(0);
  return [JSON.parse(textOf(whole.subarray(0, end))), whole.subarray(end + 1)];
}

/** The text of a script. A damaged script has bytes that are no text, which raises an error. */
function unpackScript(packed) {
  return new TextDecoder("utf-8", { fatal: true }).decode(unpackLzma(packed));
}

/** Runs plotly.js. The content security policy has the hash of its text. */
async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpack("plotly", unpackScript);
  document.body.append(script);
}
