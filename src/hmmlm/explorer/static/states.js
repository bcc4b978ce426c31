"use strict";
// States: search by word, and the page of a state.

const States = { state: null, find: "" };

States.show = async function show(state) {
  States.state = StateMap.selected = state;
  StateMap.draw();
  const side = $("state");
  if (state === null) { States.hint(); return; }
  side.classList.add("busy");
  let passages = null;
  try {
    const page = await ask("state", { state });
    if (States.state !== state) return;
    const step = (to, name, sign) => el("button", { class: "plain", type: "button", disabled: to === null, "aria-label": name, title: name, onclick: () => App.openState(to) }, sign);
    const [biggest, scale] = [barScale(page.words), barScale(page.says_next)];
    passages = el("div", {}, el("p", { class: "muted small" }, "Reading the training text …"));
    fill(side,
      el("div", { class: "head" }, el("h2", {}, `State ${state}`),
        el("span", {}, step(page.previous, "State with the next larger share", "←"), " ", step(page.next, "State with the next smaller share", "→"))),
      el("p", { class: "figures" }, el("b", {}, percent(page.share)), ` of tokens in the long run${page.exact ? "" : " (estimated)"} · rank `, el("b", {}, whole(page.rank)), ` of ${whole(App.model.states)}`),
      el("h3", {}, "Most telling words, and how often it emits them"),
      rows(page.words.map((w) => row(word(w.text), w.p, `${percent(w.p)} · ×${short(w.lift)}`, { scale: biggest, own: true }))),
      el("div", { class: "pair" },
        el("div", {}, el("h3", {}, "Comes from"), page.before.length ? stateRows(page.before, App.openState) : el("p", { class: "muted small" }, "no state")),
        el("div", {}, el("h3", {}, "Goes to"), stateRows(page.after, App.openState))),
      el("h3", {}, "Passages of the training text where it is most certain"), passages,
      el("h3", {}, "What it says next"),
      rows(page.says_next.map((w) => row(word(w.text), w.p, percent(w.p), { scale }))));
    side.classList.remove("busy");
    if (innerWidth < 960) side.scrollIntoView({ block: "start", behavior: "smooth" });
    const found = await ask("passages", { state });
    if (States.state !== state) return;
    fill(passages, found.passages.length ? el("ul", { class: "passages reading" }, found.passages.map((p) =>
      el("li", { dir: "auto" }, el("small", {}, percent(p.p)), `${p.before} `, el("mark", {}, p.word), ` ${p.after}`)))
      : el("p", { class: "muted small" }, found.problem || "Its words are not in the training text."));
  } catch (error) {
    side.classList.remove("busy");
    if (States.state !== state) return;
    if (passages) fill(passages, el("p", { class: "muted small" }, error.message));
    else fill(side, el("h2", {}, `State ${state}`), el("p", { class: "muted" }, error.message));
  }
};

States.hint = function hint() {
  fill($("state"), el("p", { class: "muted" }, "Choose a state on the map, or search for a word: the states that emit it are marked."),
    StateMap.points.length ? [el("h3", {}, "Largest states"), stateRows(StateMap.points.slice(0, 12).map((p) => ({ state: p.state, p: p.share, words: p.words.split(" ") })), App.openState)] : null);
};

States.search = latest(async (text) => {
  States.find = text;
  StateMap.hits = new Set();
  if (!text.trim()) { StateMap.draw(); States.hint(); return; }
  try {
    const found = await ask("search", { word: text });
    StateMap.hits = new Set(found.states.filter((s) => s.p >= 0.01).map((s) => s.state));
    fill($("words"), found.suggestions.map((value) => el("option", { value })));
    if (States.state === null) {
      fill($("state"),
        found.states.length ? [el("h2", {}, "States of “", word(text.trim()), "”"), el("p", { class: "muted small" }, "p(state | word) somewhere in a long text"), stateRows(found.states, App.openState)]
          : el("p", { class: "muted" }, found.problem),
        found.suggestions.length ? [el("h3", {}, "Words that start with it"), el("div", { class: "suggestions" }, found.suggestions.map((value) =>
          el("button", { class: "plain", type: "button", onclick: () => { $("word").value = value; App.find(value); } }, word(value))))] : null);
    }
  } catch (error) {
    fill($("state"), el("p", { class: "muted" }, error.message));
  }
  StateMap.draw();
});

States.start = function start() {
  let timer = null;
  $("word").disabled = recorded !== null;
  $("word").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => App.find($("word").value), 200); });
  $("find").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); App.find($("word").value); });
  $("overlay").addEventListener("change", () => States.drawRoute());
};

/** Draw the states of the sentence on the map. */
States.drawRoute = function drawRoute() {
  const tokens = Sentence.answer?.tokens || [];
  StateMap.route = $("overlay").checked ? tokens.slice(0, 60).map((token) => token.viterbi) : [];
  StateMap.visited = new Set(StateMap.route);
  StateMap.draw();
};
