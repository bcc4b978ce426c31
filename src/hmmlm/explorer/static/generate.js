"use strict";
// Generation: samples as chips with their states, p(constraint) after each token, and blanks.

const Generate = {};
const LABELS = { must: "Must contain", never: "Must not contain", choice: "Is one of", regex: "Matches (regular expression)", json: "Is JSON of this schema", words: "Number of words", tokens: "Number of tokens", suffix: "Ends with", match: "How words match" };
const ALWAYS = ["must", "never"];
const PLACEHOLDERS = { must: "words or phrases, separated by commas; a|b: one of both", never: "words or phrases, separated by commas", choice: "texts, separated by commas", words: "3-8", tokens: "3-8", match: "word, prefix or substring" };

Generate.fields = function fields() {
  const constraints = {};
  for (const [name, kind] of Object.entries(App.model.constraints)) {
    const input = $(`constraint-${name}`);
    if (!input.value.trim()) continue;
    if (kind === "bounds") constraints[name] = bounds(input.value);
    else if (kind === "text") constraints[name] = input.value;
    else constraints[name] = phrases(input.value, name === "must");
  }
  const optional = (id) => ($(id).value === "" ? null : Number($(id).value));
  return { prompt: $("prompt").value, num_samples: Number($("num").value), max_new_tokens: Number($("max").value), temperature: Number($("temperature").value),
    top_k: optional("top-k"), seed: optional("seed"), allow_unk: $("unknown").checked || !App.model.has_unknown, constraints };
};

/** "3-8" → [3, 8]; "3-" and "-8" are open, "5" is both. */
function bounds(text) {
  const [low, high = low] = text.split("-").map((part) => (part.trim() === "" ? null : Number(part)));
  return [low, high];
}

/** "a, b|c" → ["a", ["b", "c"]]. */
function phrases(text, alternatives) {
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  return parts.map((part) => (alternatives && part.includes("|") ? part.split("|").map((p) => p.trim()).filter(Boolean) : part));
}

Generate.run = latest(async (fields) => {
  const button = $("options").querySelector("button");
  button.disabled = true;
  $("samples").classList.add("busy");
  try {
    const found = await ask("generate", fields);
    Generate.draw(found);
    $("samples-note").textContent = `seed ${found.seed}${found.log_prob_accept === null ? "" : ` · p(constraint) = ${percent(Math.exp(found.log_prob_accept))} before the first token`}`;
  } catch (error) {
    $("samples-note").textContent = error.message;
    fill($("samples"));
  }
  button.disabled = false;
  $("samples").classList.remove("busy");
});

Generate.draw = function draw({ samples, log_prob_accept, states }) {
  fill($("samples"), samples.map((sample) => el("article", { class: "sample" },
    el("div", { class: "chips reading", dir: direction(sample.text) }, sample.tokens.map((token) => {
      const node = chip(token, { note: `${token.state}`, onclick: () => App.openState(token.state),
        "aria-label": `${token.text}, state ${token.state}`,
        onpointerenter: (event) => showTip(event.currentTarget, el("b", {}, `State ${token.state}`), " ", word((states[token.state] || []).slice(0, 4).join(" ")),
          el("div", { class: "muted" }, `${number(token.surprisal)} bits${token.log_prob_accept === null ? "" : ` · p(constraint) ${percent(Math.exp(token.log_prob_accept))} after it`}`)),
        onpointerleave: hideTip });
      if (!token.new) node.classList.add("given");
      return node;
    })),
    log_prob_accept === null ? null : Generate.chart(log_prob_accept, sample.tokens.filter((token) => token.new)),
    recorded ? null : el("button", { class: "plain small", type: "button", onclick: () => { App.setText(sample.text, null); App.go("sentence"); } }, "Look at it as a sentence"))));
};

/** log p(constraint) after each token, as a line that ends at certainty. */
Generate.chart = function chart(log_prob_accept, tokens) {
  const values = [log_prob_accept, ...tokens.map((token) => token.log_prob_accept ?? 0)];
  const low = Math.min(...values, -0.05);
  const [width, height, left, top, bottom] = [Math.max(300, Math.min(1120, $("samples").clientWidth || 860)), 112, 58, 12, 26];
  const x = (i) => left + (i * (width - left - 24)) / Math.max(1, values.length - 1);
  const y = (value) => top + ((height - top - bottom) * value) / low;
  const line = values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const room = Math.floor((width - left - 24) / values.length / 7.6);
  return svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `log p(constraint) after each token, from ${percent(Math.exp(log_prob_accept))}` },
    svg("line", { class: "axis", x1: left, x2: width - 24, y1: y(0), y2: y(0) }),
    svg("text", { x: left - 8, y: y(0) + 4, "text-anchor": "end" }, "100%"),
    svg("text", { x: left - 8, y: y(low) + 4, "text-anchor": "end" }, percent(Math.exp(low))),
    svg("path", { class: "area", d: `${line}L${x(values.length - 1)} ${y(low)}L${x(0)} ${y(low)}Z` }),
    svg("path", { class: "first", d: line }),
    values.map((value, i) => svg("circle", { class: "dot", cx: x(i), cy: y(value), r: 2.6 })),
    room > 3 ? tokens.map((token, i) => svg("text", { x: x(i + 1), y: height - 6, "text-anchor": "middle" }, (token.end ? "⏎" : token.text).slice(0, room))) : null);
};

Generate.fill = latest(async (text) => {
  if (!text.trim()) { fill($("filled")); return; }
  try {
    const { blanks } = await ask("fill", { text, allow_unk: $("unknown").checked || !App.model.has_unknown });
    fill($("filled"), blanks.map((words, i) => {
      const scale = barScale(words);
      return el("div", {}, el("h3", {}, blanks.length > 1 ? `Blank ${i + 1}` : "The blank"), rows(words.map((w) => row(word(w.text), w.p, percent(w.p), {
        scale, label: `Fill in ${w.text}`, onclick: () => { $("blanks").value = putWord(text, i, w.text); Generate.submitFill(); } }))));
    }));
  } catch (error) {
    fill($("filled"), el("p", { class: "muted" }, error.message));
  }
});

/** Write a word into one blank of a text. */
function putWord(text, blank, value) {
  let n = -1;
  return text.replace(/(?<![\p{L}\p{N}_])_{3,}(?![\p{L}\p{N}_])/gu, (match) => { n += 1; return n === blank ? value : match; });
}

Generate.submitFill = function submitFill() {
  App.remember();
  const text = $("blanks").value;
  if (text.includes("___")) Generate.fill(text);
  else { fill($("filled"), el("p", { class: "muted" }, "All blanks are filled. Write ___ where a word is missing.")); }
};

Generate.start = function start() {
  const field = (name) => el("label", { class: "field" }, el("span", {}, LABELS[name] || name),
    el("input", { id: `constraint-${name}`, placeholder: PLACEHOLDERS[name], maxlength: 2000, autocomplete: "off", spellcheck: "false", dir: "auto" }));
  const names = Object.keys(App.model.constraints);
  const others = names.filter((name) => !ALWAYS.includes(name));
  fill($("constraints"), names.filter((name) => ALWAYS.includes(name)).map(field),
    others.length ? el("details", { id: "more", class: "wide" }, el("summary", {}, "More constraints"), el("div", { class: "grid" }, others.map(field))) : null);
  $("unknown").parentElement.hidden = !App.model.has_unknown;
  // Samples without <unk> need a sum over all states for each token.
  $("unknown").checked = $("unknown").defaultChecked = App.model.states > 4096;
  $("options").addEventListener("submit", (event) => { event.preventDefault(); App.remember(); Generate.run(Generate.fields()); });
  $("fill").addEventListener("submit", (event) => { event.preventDefault(); Generate.submitFill(); });
  if (recorded) {
    $("options").hidden = $("fill").hidden = true;
    $("fill").previousElementSibling.hidden = true;
  }
};
