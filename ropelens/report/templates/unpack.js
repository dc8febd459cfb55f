"use strict";
/** plotly.js lies compressed in the page, and becomes a script whose hash the policy names. */
async function unpackPlotly() {
  if (!window.DecompressionStream) {
    document.querySelector("header").append("This browser is too old to draw the figures.");
  }
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.body.append(script);
}
