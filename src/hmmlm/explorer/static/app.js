"use strict";
// Panels and permalinks: the fragment of the address names the panel and what it shows.

const PANELS = ["sentence", "states", "generate", "compare", "run"];
const App = { panel: null, model: null };

/** Read the address: #states/317?find=word. */
function address() {
  const [path, query] = location.hash.slice(1).split(/\?(.*)/s);
  const [panel, state] = path.split("/");
  return { panel: PANELS.includes(panel) ? panel : "sentence", state: /^\d+$/.test(state || "") ? Number(state) : null, query: new URLSearchParams(query || "") };
}

/** Return the address of what is shown. */
function permalink() {
  const query = new URLSearchParams();
  if (Sentence.text && Sentence.text !== App.model.sentence) query.set("text", Sentence.text);
  let path = App.panel;
  if (App.panel === "sentence" && Sentence.at !== null) query.set("at", Sentence.at);
  if (App.panel === "states") {
    if (States.state !== null) path += `/${States.state}`;
    if (States.find) query.set("find", States.find);
  }
  if (App.panel === "generate") {
    for (const input of $("panel-generate").querySelectorAll("input")) {
      const [value, usual] = input.type === "checkbox" ? [input.checked ? "1" : "0", input.defaultChecked ? "1" : "0"] : [input.value, input.defaultValue];
      if (value !== usual) query.set(input.id, value);
    }
  }
  return `#${path}${query.size ? `?${query}` : ""}`;
}

App.remember = function remember(push = false) {
  const to = permalink();
  if (to !== location.hash) history[push ? "pushState" : "replaceState"](null, "", to);
};

App.setText = function setText(text, at) {
  if ([...text].length > App.model.max_characters) text = [...text].slice(0, App.model.max_characters).join("");
  for (const id of ["text", "text-2"]) if ($(id).value !== text) $(id).value = text;
  Sentence.text = text;
  Sentence.at = at;
  fit($("text"));
  fit($("text-2"));
  App.remember();
  Sentence.update(text, at).then(() => { States.drawRoute(); if (App.panel === "compare") Compare.update(Sentence.text); });
};

/** Let a text area grow with its text. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

App.openState = function openState(state) {
  App.go("states", state);
};

App.find = function find(text) {
  States.find = text;
  if (App.panel === "states") { States.state = null; StateMap.selected = null; App.remember(); }
  States.search(text);
};

App.go = function go(panel, state) {
  if (state !== undefined) States.state = state;
  App.show(panel);
  App.remember(true);
};

App.show = function show(panel) {
  App.panel = panel;
  hideTip();
  for (const name of PANELS) $(`panel-${name}`).hidden = name !== panel;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.panel === panel) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  fit($("text"));
  fit($("text-2"));
  if (panel === "states") {
    StateMap.load().then(() => { if (States.state === null && !States.find) States.hint(); });
    States.drawRoute();
    if (States.state !== null || !States.find) States.show(States.state);
    else States.search(States.find);
  }
  if (panel === "compare") Compare.update(Sentence.text);
  if (panel === "run") Run.load();
  if (panel === "generate" && !$("samples").firstChild) Generate.run(recorded ? { seed: 0 } : Generate.fields());
};

/** Show what the address names. */
App.follow = function follow() {
  const { panel, state, query } = address();
  States.state = panel === "states" ? state : null;
  if (panel === "states") { States.find = query.get("find") || ""; $("word").value = States.find; }
  if (panel === "generate") {
    for (const input of $("panel-generate").querySelectorAll("input")) {
      const value = query.get(input.id);
      if (input.type === "checkbox") input.checked = value === null ? input.defaultChecked : value === "1";
      else if (value !== null) {
        input.value = value;
        if (input.closest("#more")) $("more").open = true;
      }
    }
  }
  const text = query.get("text") ?? (Sentence.text || App.model.sentence);
  const at = query.has("at") ? Number(query.get("at")) : null;
  App.panel = panel;
  if (text !== Sentence.text || !Sentence.answer) App.setText(text, at);
  else if (panel === "sentence" && at !== null && at !== Sentence.at && Sentence.answer.tokens[at]) Sentence.select(at, false);
  App.show(panel);
  if (panel === "states" && States.find) States.search(States.find);
  if (panel === "generate" && $("blanks").value.includes("___")) Generate.fill($("blanks").value);
};

App.start = async function start() {
  try {
    App.model = await ask("model", {});
  } catch (error) {
    $("notice").textContent = error.message;
    $("notice").hidden = false;
    document.addEventListener("back", () => location.reload(), { once: true });
    return;
  }
  const { name, states, words, kind } = App.model;
  document.title = `${name} · hmmlm explorer`;
  $("name").textContent = name;
  $("facts").textContent = `${counted(states, "state")} · ${counted(words, App.model.tokenizer === "word" ? "word" : "token")}${kind === "dense × categorical" ? "" : ` · ${kind}`}`;
  if (recorded) {
    $("notice").textContent = "Exported from hmmlm explore: what needs the model is left out.";
    $("notice").className = "quiet";
    $("notice").hidden = false;
  }
  Sentence.start();
  States.start();
  Generate.start();
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    App.go(link.dataset.panel);
    $("main").focus({ preventScroll: true });
  }));
  addEventListener("hashchange", App.follow);
  addEventListener("scroll", hideTip, { passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  document.addEventListener("back", () => { StateMap.loading = false; App.setText($("text").value, Sentence.at); App.show(App.panel); });
  App.follow();
};

App.start();
