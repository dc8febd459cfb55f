"use strict";
/** Whether what lies compressed in the page can be read; else it stays the page without scripts. */
const unpacks = Boolean(window.DecompressionStream);
document.documentElement.classList.toggle("scripted", unpacks);
if (!unpacks) {
  document.querySelector("header").append("This browser is too old to draw the figures.");
  for (const whole of document.querySelectorAll("noscript")) whole.outerHTML = whole.textContent;
}

/** The text that lies in an element; in a browser that cannot read it all who ask wait for ever. */
async function unpack(id) {
  if (!unpacks) return new Promise(() => {});
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** plotly.js becomes a script whose hash the policy names. */
async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.body.append(script);
}
