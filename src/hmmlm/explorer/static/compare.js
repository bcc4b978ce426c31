"use strict";
// Two models: the surprisal of each token under both.

const Compare = {};
const COMPARED_ROWS = 400;

Compare.update = latest(async (text) => {
  $("compared").classList.add("busy");
  try {
    const found = await ask("compare", { text });
    if (found.ready) Compare.draw(found);
    else {
      fill($("compare-figures"), el("p", { class: "muted" }, "Counting the n-gram …"));
      setTimeout(() => App.panel === "compare" && Compare.update(Sentence.text), 700);
    }
  } catch (error) {
    fill($("compare-figures"), el("p", { class: "muted" }, error.message));
    fill($("compared"));
  }
  $("compared").classList.remove("busy");
});

Compare.draw = function draw({ models, aligned }) {
  const [a, b] = models;
  const difference = a.bits === null || b.bits === null ? null : b.bits - a.bits;
  const tile = (model, first) => el("div", { class: `tile${first ? " first" : ""}` }, el("span", {}, el("i", { class: `dot-key${first ? " first" : ""}` }), model.name),
    el("b", {}, `${number(model.bits)} bits`), el("span", { class: "muted small" }, `perplexity ${number(model.perplexity)}${model.bits_per_byte === null ? "" : ` · ${number(model.bits_per_byte, 2)} bits per byte`}`));
  const verdict = difference === null ? "–" : Math.abs(difference) < 0.05 ? "equal" : difference > 0 ? a.name : b.name;
  fill($("compare-figures"), tile(a, true), tile(b, false),
    el("div", { class: "tile" }, "assigns more probability", el("b", {}, verdict),
      el("span", { class: "muted small" }, difference ? `2^${number(Math.abs(difference))} ${Math.abs(difference) < 30 ? `= ${short(2 ** Math.abs(difference))}` : ""} times` : "")));
  if (!aligned) {
    fill($("compared"), el("p", { class: "muted" }, "The two models have different vocabularies, so their tokens differ: compare the totals.",
      models.some((model) => model.tokens.some((token) => token.unknown)) ? " Unknown words are read as <unk>, which is easier to predict than the word." : null),
      models.map((model) => el("div", {}, el("h3", {}, model.name), el("div", { class: "chips reading", dir: direction(Sentence.text) }, model.tokens.map((token) => chip(token, { note: number(token.surprisal) }))))));
    return;
  }
  const most = Math.max(12, ...models.flatMap((model) => model.tokens.map((token) => token.surprisal ?? 0)));
  const header = el("div", { class: "versus header" }, el("span", {}, "token"), el("span", {}, "bits"), el("span", { class: "n" }, el("i", { class: "dot-key first" })), el("span", { class: "n" }, el("i", { class: "dot-key" })), el("span", { class: "n difference" }, "gain"));
  const surfaces = Sentence.answer?.tokens || [];
  fill($("compared"), header, a.tokens.slice(0, COMPARED_ROWS).map((token, i) => {
    const other = b.tokens[i];
    const gain = token.surprisal === null || other.surprisal === null ? null : other.surprisal - token.surprisal;
    const bar = (value, first) => el("i", { class: first ? "first" : null, "--p": value === null ? 1 : value / most });
    return el("div", { class: "versus" }, el("span", { class: "token reading" }, word(token.end ? "⏎" : surfaces[i]?.id === token.id ? surfaces[i].surface : token.text)),
      el("span", { class: "bars" }, bar(token.surprisal, true), bar(other.surprisal, false)),
      el("span", { class: "n" }, number(token.surprisal)), el("span", { class: "n" }, number(other.surprisal)),
      el("span", { class: `n difference${gain > 0.5 ? " better" : ""}` }, gain === null ? "–" : `${gain > 0 ? "+" : gain < 0 ? "−" : ""}${number(Math.abs(gain))}`));
  }), a.tokens.length > COMPARED_ROWS ? el("p", { class: "muted" }, `The first ${COMPARED_ROWS} of ${whole(a.tokens.length)} tokens are listed.`) : null);
};
