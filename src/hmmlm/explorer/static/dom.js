"use strict";
// Elements, numbers and small parts that panels share. Text is only ever set as text, never parsed as HTML.

const $ = (id) => document.getElementById(id);

/** Create an element: el("p", {class: "muted", onclick: f}, "text", child, …). */
function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Create an element of SVG. */
function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

const number = (value, digits = 1) =>
  value === null || value === undefined ? "∞" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: Math.abs(value) < 100 ? digits : 0 });
const whole = (value) => Math.round(value).toLocaleString("en");
/** A number with its noun: 1 token, 2,000 tokens. */
const counted = (value, noun) => `${whole(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A probability: only impossible and certain events read 0% and 100%. */
function percent(p) {
  if (p <= 0) return "0%";
  if (p < 0.0001) return p.toExponential(0).replace("e-", "·10⁻").replace(/⁻(\d+)$/, (_, n) => "⁻" + [...n].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join(""));
  if (p < 0.01) return `${(100 * p).toFixed(2)}%`;
  if (p < 0.1) return `${(100 * p).toFixed(1)}%`;
  return p > 0.995 && p < 1 ? `${Math.min(99.99, 100 * p).toFixed(2)}%` : `${(100 * p).toFixed(0)}%`;
}

function bytes(size) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (size >= 1000 && unit < 3) { size /= 1000; unit += 1; }
  return `${size.toFixed(unit && size < 10 ? 1 : 0)} ${units[unit]}`;
}

const short = (value) => (value >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : value >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(3)}`);

/** A row of a list with a bar; a button if it does something. */
function row(name, p, value, { onclick, own, label, scale = 1 } = {}) {
  const kind = onclick ? "button" : "div";
  return el("li", {}, el(kind, { class: `row${own ? " own" : ""}`, type: onclick ? "button" : null, onclick, "aria-label": label, title: label },
    el("span", { class: "name" }, name), el("span", { class: "value" }, value),
    el("span", { class: "track" }, el("i", { "--p": Math.min(1, p / scale) }))));
}

/** The probability of a bar of full length: small ones are enlarged, large ones keep their proportion to one. */
const barScale = (items) => Math.max(0.02, ...items.map((item) => Math.min(1, item.p * (1 + 0.6 * (1 - item.p)))));

const rows = (items) => el("ul", { class: "rows" }, items);

/** A word in its own direction: right-to-left words do not reorder what surrounds them. */
const word = (text) => el("bdi", {}, text === " " ? "␣" : text);

/** The direction of a line of words: that of its first letter. (dir="auto" does not look into <bdi>.) */
function direction(text) {
  const letter = text.match(/\p{L}/u);
  return letter && /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(letter[0]) ? "rtl" : "ltr";
}

/** The list of states with a probability each; a click opens a state. */
function stateRows(states, open) {
  const scale = barScale(states);
  return rows(states.map((s) => row([el("b", {}, `${s.state}`), word(s.words.slice(0, 4).join(" "))], s.p, percent(s.p), {
    scale, onclick: () => open(s.state), label: `State ${s.state}: ${s.words.join(" ")}` })));
}

/** A token as a chip whose background is its surprisal; 16 bits or more are the deepest. */
function chip(token, { note, ...attributes } = {}) {
  const impossible = token.surprisal === null;
  const kinds = ["chip", token.continues && "continues", token.unknown && "unknown", token.end && "end-of-line", impossible && "impossible"];
  const level = impossible ? 1 : Math.min(1, token.surprisal / 16);
  const text = token.end ? "⏎" : token.surface ?? token.text;
  return el("button", { class: kinds.filter(Boolean).join(" "), type: "button", "--level": level.toFixed(3), ...attributes },
    word(text), note === undefined ? null : el("small", {}, note));
}

// --- tooltip ---

function showTip(anchor, ...children) {
  const tip = $("tip");
  fill(tip, ...children);
  tip.hidden = false;
  const box = anchor.getBoundingClientRect ? anchor.getBoundingClientRect() : anchor;
  const size = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(innerWidth - size.width - 8, box.left + box.width / 2 - size.width / 2));
  const above = box.top - size.height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

function hideTip() {
  $("tip").hidden = true;
}
