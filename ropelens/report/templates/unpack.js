"use strict";
/** Whether what lies compressed in the page can be read; else it stays the page without scripts. */
const unpacks = Boolean(window.DecompressionStream);
document.documentElement.classList.toggle("scripted", unpacks);
if (!unpacks) goWithout("This browser is too old to draw the figures.");

/** The page without scripts, and why. */
function goWithout(words) {
  document.documentElement.classList.remove("scripted");
  document.querySelector("header").append(words);
  for (const whole of document.querySelectorAll("noscript")) whole.outerHTML = whole.textContent;
}

/** What base64 stands for; in older browsers a loop, for a function a byte takes far longer. */
function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** The text that lies in an element; where it cannot be read all who ask wait for ever. */
async function unpack(id) {
  if (!unpacks) return new Promise(() => {});
  try {
    const packed = bytesOf(document.getElementById(id).textContent);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).text();
  } catch {
    goWithout("This file is damaged: make the page again with ropelens report.");
    return new Promise(() => {});
  }
}

/** plotly.js becomes a script whose hash the policy names. */
async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.body.append(script);
}
