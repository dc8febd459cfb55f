"use strict";
document.documentElement.classList.add("scripted");

/** What base64 stands for; in older browsers a loop, for a function a byte takes far longer. */
function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** The bytes that lie in an element. Where they cannot be read the page says so, becomes the one
 * without scripts, and all who ask wait for ever. */
async function unpack(id) {
  try {
    const packed = bytesOf(document.getElementById(id).textContent);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    document.documentElement.classList.remove("scripted");
    document.querySelector("header").append("The figures cannot be read: this browser is too old, or the file is damaged (ropelens report makes it again).");
    for (const whole of document.querySelectorAll("noscript")) whole.outerHTML = whole.textContent;
    return new Promise(() => {});
  }
}

const textOf = (bytes) => new TextDecoder().decode(bytes);

/** The payload, and behind a zero the bytes of its arrays. */
async function unpackPayload() {
  const whole = await unpack("payload"), end = whole.indexOf(0);
  return [JSON.parse(textOf(whole.subarray(0, end))), whole.subarray(end + 1)];
}

/** plotly.js becomes a script whose hash the policy names. */
async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = textOf(await unpack("plotly"));
  document.body.append(script);
}
