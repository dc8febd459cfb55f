// Writes ropelens/report/templates/plotly/plotly.min.js: the parts of plotly.js that pages draw with.
//
//     npm install --prefix build/plotly --ignore-scripts plotly.js@4.1.1 esbuild@0.28.2 acorn@8 acorn-walk@8
//     cp tools/plotly.mjs build/plotly/ && node build/plotly/plotly.mjs
//
// The bundle has scatters, bars and heat maps. It has no components that the figures do not use,
// and no descriptions of attributes, which plotly's own bundles do not have either.

import { readFileSync, writeFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parse } from "acorn";
import { simple } from "acorn-walk";
import { build, transform } from "esbuild";

const FOLDER = dirname(fileURLToPath(import.meta.url));
const OUT = resolve(FOLDER, "../../ropelens/report/templates/plotly/plotly.min.js");
const PACKAGE = resolve(FOLDER, "node_modules/plotly.js");
const TARGET = "es2020";
const TRACES = ["bar", "heatmap"]; // next to scatter, which is part of the core
const UNUSED = ["annotations3d", "images", "updatemenus", "rangeslider", "rangeselector", "grid"];
const DESCRIPTIONS = new Set(["description", "requiredOpts", "otherOpts", "hrName"]);

/** Removes the components that figures do not use from the list in core.js. */
const withoutUnused = {
  name: "without-unused",
  setup(bundler) {
    bundler.onLoad({ filter: /plotly\.js[/\\]src[/\\]core\.js$/ }, ({ path }) => {
      let text = readFileSync(path, "utf8");
      for (const component of UNUSED) {
        const line = `    require('./components/${component}'),\n`;
        if (!text.includes(line)) {
          throw new Error(`core.js does not require ${component}`);
        }
        text = text.replace(line, "");
      }
      return { contents: text };
    });
  },
};

/** Whether an expression is a text, a list, or a list that is joined to a text. */
function isConstant(node) {
  if (node.type === "Literal") {
    return typeof node.value === "string";
  }
  if (node.type === "BinaryExpression") {
    return isConstant(node.left) && isConstant(node.right);
  }
  if (node.type === "CallExpression" && node.callee.type === "MemberExpression") {
    return node.callee.property.name === "join" && node.callee.object.type === "ArrayExpression";
  }
  return node.type === "ArrayExpression";
}

/** The text of a script without the descriptions in its objects. */
function withoutDescriptions(text) {
  const spans = [];
  simple(parse(text, { ecmaVersion: "latest" }), {
    ObjectExpression({ properties }) {
      for (const property of properties) {
        const name = property.type === "Property" && !property.computed && property.key.name;
        if (DESCRIPTIONS.has(name) && isConstant(property.value)) {
          const comma = /^\s*,/.exec(text.slice(property.end));
          spans.push([property.start, property.end + (comma ? comma[0].length : 0)]);
        }
      }
    },
  });
  spans.sort((one, other) => other[0] - one[0]);
  for (const [start, end] of spans) {
    text = text.slice(0, start) + text.slice(end);
  }
  return text;
}

const registered = TRACES.map((name) => `require("plotly.js/lib/${name}")`);
const bundle = await build({
  stdin: {
    contents: `const Plotly = require("plotly.js/lib/core");
      Plotly.register([${registered}]);
      module.exports = Plotly;`,
    resolveDir: FOLDER,
  },
  bundle: true,
  write: false,
  format: "iife",
  globalName: "Plotly",
  target: TARGET,
  alias: { stream: "stream-browserify" },
  define: { global: "window", "define.amd": "false" },
  loader: { ".css": "empty" },
  legalComments: "none",
  plugins: [withoutUnused],
});
const { version } = JSON.parse(readFileSync(resolve(PACKAGE, "package.json"), "utf8"));
const script = withoutDescriptions(bundle.outputFiles[0].text);
const { code } = await transform(script, { minify: true, target: TARGET, legalComments: "none" });
const license = `/**
* plotly.js (part of ropelens - minified) v${version}
* Copyright 2012-2026, Plotly, Inc.
* All rights reserved.
* Licensed under the MIT license
*/
`;
writeFileSync(OUT, license + code);
console.log(`${OUT}: ${(license.length + code.length).toLocaleString("en")} bytes`);
