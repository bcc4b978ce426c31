"use strict";
// The sentence: chips by surprisal, the path of states, and what could stand in the place of a token.

const Sentence = { text: "", at: null, answer: null };

/** Characters as Python counts them, so that positions of tokens fit. */
const characters = (text) => Array.from(text);

Sentence.update = latest(async (text, at) => {
  Sentence.text = text;
  $("chips").classList.add("busy");
  try {
    Sentence.answer = await ask("sentence", { text });
    const letters = characters(text);
    for (const token of Sentence.answer.tokens) token.surface = letters.slice(token.start, token.stop).join("") || token.text;
    Sentence.draw(at);
  } catch (error) {
    $("sentence-figures").textContent = error.message;
  }
  $("chips").classList.remove("busy");
});

Sentence.draw = function draw(at) {
  const { tokens, bits, perplexity, omitted, problem } = Sentence.answer;
  const unknown = tokens.filter((token) => token.unknown).length;
  fill($("sentence-figures"),
    el("b", {}, whole(tokens.length)), tokens.length === 1 ? " token · " : " tokens · ", el("b", {}, number(bits)), ` bits · perplexity `, el("b", {}, number(perplexity)),
    unknown ? ` · ${counted(unknown, "unknown word")}` : null,
    omitted ? ` · without the last ${counted(omitted, "token")}` : null,
    problem ? ` · no states: ${problem}` : null);
  const lines = [[]];
  tokens.forEach((token, i) => {
    const best = token.states?.[0];
    lines.at(-1).push(chip(token, {
      note: best ? `${best[0]}` : "–", "data-at": i, tabindex: i === 0 ? 0 : -1, "aria-pressed": "false",
      "aria-label": describe(token),
      onclick: () => Sentence.select(i, true),
      onpointerenter: (event) => event.pointerType === "mouse" && showTip(event.currentTarget, Sentence.tip(token)),
      onpointerleave: hideTip,
      onfocus: (event) => event.currentTarget.matches(":focus-visible") && showTip(event.currentTarget, Sentence.tip(token)),
      onblur: hideTip,
    }));
    if (token.end && i + 1 < tokens.length) lines.push([]);
  });
  hideTip();
  fill($("chips"), lines.map((line) => el("div", { class: "chips", dir: direction(line.map((node) => node.firstChild.textContent).join(" ")) }, line)));
  Sentence.drawPath();
  if (at !== null && at !== undefined && at < tokens.length) Sentence.select(at, false);
  else { Sentence.at = null; Sentence.hint(); }
};

function describe(token) {
  const best = token.states?.[0];
  const state = best ? `, state ${best[0]}, ${percent(best[1])}` : "";
  return `${token.end ? "end of line" : token.surface}: ${token.surprisal === null ? "impossible" : `${number(token.surprisal)} bits`}${state}`;
}

Sentence.hint = function hint() {
  fill($("token"), el("p", { class: "muted" }, "Select a token to see its states, and everything that could stand in its place given both sides. Choose a word there to replace it."));
};

Sentence.tip = function tip(token) {
  const words = Sentence.answer.states;
  return [
    el("b", {}, word(token.end ? "end of line" : token.surface)), ` ${number(token.surprisal)} bits`,
    token.states ? el("table", {}, el("tbody", {}, token.states.filter(([, p]) => p >= 0.005).map(([state, p]) =>
      el("tr", {}, el("td", {}, percent(p)), el("td", {}, `${state}`), el("td", { class: "muted" }, word((words[state] || []).slice(0, 3).join(" "))))))) : null,
  ];
};

Sentence.select = async function select(i, changed) {
  const { tokens, states } = Sentence.answer;
  const token = tokens[i];
  Sentence.at = i;
  for (const node of $("chips").querySelectorAll(".chip")) {
    const own = Number(node.dataset.at) === i;
    node.setAttribute("aria-pressed", own);
    node.tabIndex = own ? 0 : -1;
  }
  if (changed) App.remember();
  const side = $("token");
  const list = el("div", { class: "busy" }, el("p", { class: "muted small" }, "…"));
  fill(side,
    el("h2", { class: "reading" }, word(token.end ? "end of line" : token.surface)),
    el("p", { class: "figures" }, el("b", {}, number(token.surprisal)), ` bits given what precedes`,
      token.entropy === undefined ? null : [` · states: `, el("b", {}, number(token.entropy)), ` bits of entropy`]),
    token.unknown ? el("p", { class: "small muted" }, `Not in the vocabulary: read as ${token.text}.`) : null,
    token.states ? [el("h3", {}, "States here"), stateRows(token.states.map(([state, p]) => ({ state, p, words: states[state] || [] })), App.openState),
      token.viterbi !== token.states[0][0] ? el("p", { class: "small muted" }, `On the most likely path: state ${token.viterbi}.`) : null] : null,
    el("h3", {}, "What could stand here, given both sides"), list);
  try {
    const found = await ask("blank", { text: Sentence.text, position: i });
    if (Sentence.at !== i) return;
    const scale = barScale(found.words);
    list.className = "";
    fill(list, rows(found.words.map((w) => row(word(w.text), w.p, percent(w.p), {
      scale, own: w.id === token.id, label: `Replace by ${w.text}`, onclick: recorded ? undefined : () => Sentence.replace(i, w) }))),
    el("p", { class: "small muted" }, `${token.end ? "The end of the line" : `“${token.surface}”`} is number ${whole(found.token.rank)} here, with ${percent(found.token.p)}.`));
  } catch (error) {
    list.className = "";
    fill(list, el("p", { class: "muted" }, error.message));
  }
};

/** Put a word in the place of a token. */
Sentence.replace = function replace(i, chosen) {
  const token = Sentence.answer.tokens[i];
  const letters = characters(Sentence.text);
  let before = letters.slice(0, token.start).join("");
  const after = letters.slice(token.stop).join("");
  if (chosen.continues && !token.continues && i > 0) before = before.replace(/ $/, "");
  else if (!chosen.continues && (token.continues || token.end) && /\S$/.test(before)) before += " ";
  App.setText(before + chosen.text + after, i);
};

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const PATH_TOKENS = 60;
const PATH_STATES = 16;

Sentence.drawPath = function drawPath() {
  const tokens = Sentence.answer.tokens.slice(0, PATH_TOKENS);
  const shown = tokens.length > 0 && tokens[0].states;
  $("path").parentElement.hidden = !shown;
  if (!shown) return;
  const weight = new Map();
  for (const token of tokens) for (const [state, p] of token.states) weight.set(state, Math.max(weight.get(state) || 0, p));
  const visited = [...new Set(tokens.map((token) => token.viterbi))];
  const likely = [...weight.keys()].filter((s) => !visited.includes(s) && weight.get(s) > 0.15).sort((a, b) => weight.get(b) - weight.get(a));
  const states = [...visited, ...likely].slice(0, PATH_STATES);
  const [left, top, high] = [150, 74, 22];
  const wide = Math.max(28, Math.min(60, ($("path").clientWidth - left - 44) / tokens.length));
  const place = new Map(states.map((state, i) => [state, i]));
  const parts = [];
  states.forEach((state, r) => {
    const y = top + r * high;
    const words = (Sentence.answer.states[state] || []).slice(0, 2).join(" ");
    parts.push(svg("line", { class: "line", x1: left, x2: left + tokens.length * wide, y1: y + high, y2: y + high }),
      svg("text", { class: "row-label", x: left - 8, y: y + 15, "text-anchor": "end", tabindex: 0, role: "link", onclick: () => App.openState(state),
        onkeydown: (event) => event.key === "Enter" && App.openState(state) }, cut(`${state} ${words}`, 18)));
  });
  tokens.forEach((token, c) => {
    const x = left + c * wide;
    parts.push(svg("text", { transform: `translate(${x + wide / 2 + 3} ${top - 6}) rotate(-50)` }, cut(token.end ? "⏎" : token.surface, 12)));
    for (const [state, p] of token.states) {
      if (place.has(state)) parts.push(svg("rect", { class: "cell", x: x + 2, y: top + place.get(state) * high + 2, width: wide - 4, height: high - 4, rx: 4, "fill-opacity": p.toFixed(3) }));
    }
    if (place.has(token.viterbi)) parts.push(svg("rect", { class: "ring", x: x + 2, y: top + place.get(token.viterbi) * high + 2, width: wide - 4, height: high - 4, rx: 4 }));
  });
  const [width, height] = [left + tokens.length * wide + 40, top + states.length * high + 4];
  fill($("path"), svg("svg", { class: "heat", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Posterior of the states of each token, with the Viterbi path" }, parts));
};

Sentence.start = function start() {
  let timer = null;
  for (const id of ["text", "text-2"]) {
    $(id).readOnly = recorded !== null;
    $(id).maxLength = App.model.max_characters;
    $(id).addEventListener("input", (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => App.setText(event.target.value, null), 180);
    });
  }
  $("chips").addEventListener("keydown", (event) => {
    const nodes = [...$("chips").querySelectorAll(".chip")];
    const at = nodes.indexOf(document.activeElement);
    const rtl = at >= 0 && getComputedStyle(nodes[at]).direction === "rtl";
    const step = { ArrowRight: rtl ? -1 : 1, ArrowLeft: rtl ? 1 : -1, Home: -at, End: nodes.length - 1 - at }[event.key];
    if (at < 0 || step === undefined || !nodes[at + step]) return;
    event.preventDefault();
    nodes[at].tabIndex = -1;
    nodes[at + step].tabIndex = 0;
    nodes[at + step].focus();
  });
};
