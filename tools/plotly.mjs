// Writes ropelens/report/templates/plotly/plotly.min.js: the parts of plotly.js that pages draw with.
//
//     npm install --prefix build/plotly --ignore-scripts plotly.js@4.1.1 esbuild@0.28.2 acorn@8 acorn-walk@8
//     cp tools/plotly.mjs build/plotly/ && node build/plotly/plotly.mjs
//
// The bundle has scatters, bars and heat maps. It has no components that the figures do not use,
// no parts of libraries that these components do not call, and no descriptions of attributes, which
// plotly's own bundles do not have either.

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
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
/** Modules without contents: no figure counts points, and pages validate no figures. */
const EMPTY = ["plot_api/validate.js", "traces/histogram2d/calc.js"];
const ICONS = ["camera", "zoombox", "pan", "home"]; // of the buttons that pages have
/** Parts of d3 that plotly.js uses only for other traces, or not at all. */
const UNUSED_D3 = /^d3(\.(geom|layout|svg|random|nest|xhr|dsv|csv|tsv|json|text|html|xml)\b|\.behavior\.zoom\b|\.interpolateZoom\b|_(geom|layout|svg)_)/;
/** Modules of which plotly.js needs few functions. */
const SMALL_MODULES = {
  culori: `import { modeHsl, modeLrgb, modeRgb, useMode } from "culori/fn";
    export { converter, formatHex, formatRgb, wcagContrast, wcagLuminance } from "culori/fn";
    useMode(modeRgb);
    useMode(modeHsl);
    useMode(modeLrgb);`,
  "gl-mat4": `export { default as invert } from "gl-mat4/invert.js";
    export { default as multiply } from "gl-mat4/multiply.js";`,
};
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

/** Empties the modules of EMPTY. */
const withEmptyModules = {
  name: "with-empty-modules",
  setup(bundler) {
    for (const file of EMPTY) {
      const filter = new RegExp(`plotly\.js/src/${file}$`);
      bundler.onLoad({ filter }, () => ({ contents: "" }));
    }
  },
};

/** The code of a statement from the name that it declares, assigns or calls. */
function subject(statement, text) {
  const isDeclaration = statement.type === "VariableDeclaration";
  const start = isDeclaration ? statement.declarations[0].start : statement.start;
  return text.slice(start, statement.end);
}

/** d3 without UNUSED_D3 and the functions that only these parts call. */
async function smallD3(text) {
  const outer = parse(text, { ecmaVersion: "latest" }).body[0].expression.argument;
  const body = outer.callee.object.body.body;
  const used = body.slice(0, -1).filter((statement) => !UNUSED_D3.test(subject(statement, text)));
  const statements = used.map((statement) => text.slice(statement.start, statement.end));
  const module = `${statements.join("\n")}\nexport default d3;`;
  const options = { format: "cjs", treeShaking: true, define: { this: "self" } };
  const { code } = await transform(module, options);
  return `${code}\nmodule.exports = d3;`;
}

/** The module as a CommonJS module, with only the functions of SMALL_MODULES. */
async function smallModule(name) {
  const { outputFiles } = await build({
    stdin: { contents: SMALL_MODULES[name], resolveDir: FOLDER },
    bundle: true,
    write: false,
    format: "cjs",
    target: TARGET,
  });
  return outputFiles[0].text;
}

/** Removes parts of libraries that plotly.js does not use here. */
const withSmallLibraries = {
  name: "with-small-libraries",
  setup(bundler) {
    bundler.onLoad({ filter: /@plotly[/\\]d3[/\\]d3\.js$/ }, async ({ path }) => {
      return { contents: await smallD3(readFileSync(path, "utf8")) };
    });
    bundler.onLoad({ filter: /plotly\.js[/\\]src[/\\]fonts[/\\]ploticon\.js$/ }, ({ path }) => {
      const all = createRequire(path)(path);
      const kept = Object.fromEntries(ICONS.map((name) => [name, all[name]]));
      return { contents: `module.exports = ${JSON.stringify(kept)};` };
    });
    const names = Object.keys(SMALL_MODULES).join("|");
    bundler.onResolve({ filter: new RegExp(`^(${names})$`) }, ({ path }) => {
      return { path, namespace: "small" };
    });
    bundler.onLoad({ filter: /.*/, namespace: "small" }, async ({ path }) => {
      return { contents: await smallModule(path) };
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
  plugins: [withoutUnused, withEmptyModules, withSmallLibraries],
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
