"use strict";
document.documentElement.classList.add("scripted");

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;/=,?@^_`{|}~";

/** Decodes base85: five digits are four bytes, and the last group may be shorter. */
function bytesOf(base85) {
  const digit = new Uint8Array(128), last = DIGITS.length - 1;
  for (let i = 0; i <= last; i++) digit[DIGITS.charCodeAt(i)] = i;
  const size = Math.floor(base85.length * 4 / 5), bytes = new Uint8Array(size + 3), view = new DataView(bytes.buffer);
  for (let i = 0, at = 0; at < size; at += 4) {
    let word = 0;
    for (const end = i + 5; i < end; i++) word = 85 * word + (i < base85.length ? digit[base85.charCodeAt(i)] : last);
    view.setUint32(at, word);
  }
  return bytes.subarray(0, size);
}

/** The decompressed bytes in an element. If they cannot be read, the page reports it and shows its
 * content for browsers without scripts, and the promise never resolves. */
async function unpack(id) {
  try {
    const packed = bytesOf(document.getElementById(id).textContent);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    document.documentElement.classList.remove("scripted");
    document.querySelector("header").append("The figures cannot be read, because this browser is too old or the file is damaged. (ropelens report writes the file again.)");
    for (const whole of document.querySelectorAll("noscript")) whole.outerHTML = whole.textContent;
    return new Promise(() => {});
  }
}

const textOf = (bytes) => new TextDecoder().decode(bytes);

/** The payload, and the bytes of its arrays after a zero byte. */
async function unpackPayload() {
  const whole = await unpack("payload"), end = whole.indexOf(0);
  return [JSON.parse(textOf(whole.subarray(0, end))), whole.subarray(end + 1)];
}

/** Runs plotly.js. The content security policy has the hash of its text. */
async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = textOf(await unpack("plotly"));
  document.body.append(script);
}
