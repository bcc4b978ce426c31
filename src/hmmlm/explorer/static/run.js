"use strict";
// The run: curves, results, settings and files.

const Run = { loaded: false };

Run.load = async function load() {
  if (Run.loaded) return;
  try {
    Run.draw(await ask("run", {}));
    Run.loaded = true;
  } catch (error) {
    fill($("run"), el("p", { class: "muted" }, error.message));
  }
};

Run.draw = function draw(run) {
  const { model } = App;
  const facts = { states: whole(model.states), vocabulary: whole(model.words), kind: model.kind, data: model.data, ...run.facts };
  const baselines = Object.entries(run.results).filter(([, scores]) => scores.valid?.perplexity).map(([name, scores]) => [name, scores.valid.perplexity]);
  const curves = run.curves;
  const room = $("run").clientWidth || 720;
  const [wide, narrow] = innerWidth > 960 ? [0.6 * room - 20, 0.4 * room - 20] : [Math.min(720, room), Math.min(560, room)];
  fill($("run"),
    run.problems.map((problem) => el("p", { class: "muted" }, problem)),
    el("dl", { class: "facts" }, Object.entries(facts).filter(([, value]) => value !== null).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, `${value}`)))),
    curves.valid?.length || curves.train?.length ? el("div", { class: "halves" },
      el("div", {}, el("h2", {}, "Learning curve"), el("p", { class: "muted small" }, "Perplexity on the validation text (line with points) and on the training text while training; dashed: n-grams of the same text."),
        lineChart([{ points: curves.train, kind: "other" }, { points: curves.valid, kind: "first", dots: true }], { log: true, levels: baselines.filter(([name]) => name !== "model" && !name.startsWith("mixture")), height: 300, width: wide, from: curves.valid?.[0]?.[1] })),
      el("div", {}, el("h2", {}, "Learning rate"), el("p", { class: "muted small" }, "By training tokens."), lineChart([{ points: curves.rate, kind: "first" }], { height: 240, width: narrow }))) : null,
    Object.keys(run.results).length ? [el("h2", {}, "Results"), table(["", "valid perplexity", "test perplexity", "bits per token", "bits per byte"], Object.entries(run.results).map(([name, scores]) =>
      [name === "model" ? model.name : name, ...[scores.valid?.perplexity, scores.test?.perplexity].map((v) => number(v ?? null)), number(scores.test?.bits_per_token ?? null, 2), scores.test?.bits_per_byte === null ? "–" : number(scores.test?.bits_per_byte ?? null, 3)]), [1, 2, 3, 4])] : null,
    el("h2", {}, "Settings that differ from the defaults"), run.changed.length ? table(["setting", "value"], run.changed) : el("p", { class: "muted" }, "none"),
    run.defaults.length ? el("details", {}, el("summary", {}, `${run.defaults.length} settings at their defaults`), table(["setting", "value"], run.defaults)) : null,
    run.files.length ? [el("h2", {}, "Files"), el("p", { class: "muted small" }, run.folder), table(["file", "size"], run.files.map((file) => [file.path, bytes(file.bytes)]), [1])] : null);
};

function table(header, lines, numeric = []) {
  const cells = (tag, line) => line.map((cell, i) => el(tag, { class: numeric.includes(i) ? "n" : null }, `${cell}`));
  return el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, el("tr", {}, cells("th", header))), el("tbody", {}, lines.map((line) => el("tr", {}, cells("td", line))))));
}

/** A chart of series of (x, y); `levels` are named horizontal lines. */
function lineChart(series, { log = false, levels = [], height = 260, width = 720, from = null } = {}) {
  const scale = log ? Math.log : (v) => v;
  const points = series.flatMap((s) => s.points || []);
  if (!points.length) return el("p", { class: "muted" }, "No records.");
  const ys = [...points.map((p) => p[1]), ...levels.map(([, v]) => v)].filter((v) => Number.isFinite(v) && (!log || v > 0));
  const top = from === null ? Math.max(...ys) : Math.min(Math.max(...ys), 1.35 * Math.max(from, ...levels.map(([, v]) => v)));
  const [low, high] = [log ? Math.log(Math.min(...ys)) : Math.min(0, ...ys), scale(top)];
  const span = high - low || 1;
  const [left, right, upper, lower] = [54, levels.length ? 108 : 26, 14, 30];
  const last = Math.max(...points.map((p) => p[0])) || 1;
  const x = (v) => left + (v / last) * (width - left - right);
  const y = (v) => height - lower - ((Math.min(scale(v), high) - low + 0.04 * span) / (1.1 * span)) * (height - upper - lower);
  const path = (list) => list.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const yTicks = log ? logTicks(Math.exp(low), top) : ticks(low, high);
  const xTicks = ticks(0, last);
  let free = Infinity;
  return svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Chart against training tokens" },
    yTicks.map((v) => [svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, short(v))]),
    xTicks.map((v) => svg("text", { x: x(v), y: height - 8, "text-anchor": "middle" }, short(v))),
    [...levels].sort((p, q) => p[1] - q[1]).map(([name, v]) => {
      free = Math.min(y(v) + 4, free - 15);
      return [svg("line", { class: "dashed", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: width - right + 6, y: free }, `${name} ${number(v)}`)];
    }),
    series.map((s) => [svg("path", { class: s.kind, d: path((s.points || []).filter((p) => scale(p[1]) <= high + 0.06 * span)) }),
      s.dots ? s.points.map(([a, b]) => svg("circle", { class: "dot", cx: x(a), cy: y(b), r: 3.2 }, svg("title", {}, `${number(b)} after ${counted(a, "token")}`))) : null,
      s.dots && s.points.length ? best(s.points, x, y) : null]));
}

function best(points, x, y) {
  const [a, b] = points.reduce((p, q) => (q[1] < p[1] ? q : p));
  return svg("text", { class: "strong", x: x(a), y: y(b) - 10, "text-anchor": "end" }, number(b));
}

/** Round numbers between two values. */
function ticks(low, high) {
  const raw = (high - low || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw) * power;
  return Array.from({ length: 8 }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step).filter((v) => v <= high * (1 + 1e-9));
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += 1) {
    for (const m of high / low > 30 ? [1, 3] : [1, 1.5, 2, 3, 5, 7]) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
  }
  return found;
}
