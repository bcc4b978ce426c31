"use strict";
// The map of states: points by what they emit and where they go, of the size of their share.

const StateMap = { points: [], view: { zoom: 1, x: 0, y: 0 }, cursor: null, selected: null, hits: new Set(), visited: new Set(), route: [] };
const MAP_PADDING = 46;

/** Fetch the map; ask again until the server has computed it. */
StateMap.load = async function load() {
  if (StateMap.points.length || StateMap.loading) return;
  StateMap.loading = true;
  if (!$("map").firstChild) fill($("map"), el("div", { class: "wait" }, "Laying out the states …"));
  try {
    const found = await ask("map", {});
    if (!found.ready) {
      setTimeout(() => { StateMap.loading = false; StateMap.load(); }, 800);
      return;
    }
    StateMap.points = found.states.map(([state, x, y, share, words]) => ({ state, x, y, share, words }));
    StateMap.byState = new Map(StateMap.points.map((point) => [point.state, point]));
    const part = StateMap.points.length < found.total ? `the ${whole(StateMap.points.length)} of ${whole(found.total)} states with the largest share` : `all of ${counted(found.total, "state")}`;
    $("map-note").textContent = `States near each other emit similar words and go to similar states. Size is the share of tokens in the long run${found.exact ? "" : " (estimated from sampled chains)"}; shown are ${part}. Wheel or +/− zooms, drag or arrow keys move, Enter opens.`;
    StateMap.build();
  } catch (error) {
    fill($("map"), el("div", { class: "wait" }, error.message));
  }
  StateMap.loading = false;
};

StateMap.build = function build() {
  const biggest = Math.max(...StateMap.points.map((p) => p.share));
  const many = Math.min(1, Math.sqrt(400 / StateMap.points.length));
  for (const point of [...StateMap.points].reverse()) {
    point.radius = 2.4 + (13 * many + 4) * Math.sqrt(point.share / biggest);
    point.node = svg("circle", { r: point.radius.toFixed(2) });
  }
  StateMap.routeNode = svg("path", { class: "route" });
  StateMap.labels = svg("g");
  StateMap.svg = svg("svg", { tabindex: 0, role: "application", "aria-label": `Map of ${counted(StateMap.points.length, "state")}. Arrow keys move between states, Enter opens one, plus and minus zoom.` },
    StateMap.points.map((point) => point.node).reverse(), StateMap.routeNode, StateMap.labels);
  const zoom = (factor) => () => { StateMap.zoom(factor); };
  fill($("map"), StateMap.svg, el("div", { class: "zoom" },
    el("button", { class: "plain", type: "button", "aria-label": "Zoom in", onclick: zoom(1.5) }, "+"),
    el("button", { class: "plain", type: "button", "aria-label": "Zoom out", onclick: zoom(1 / 1.5) }, "−"),
    el("button", { class: "plain", type: "button", "aria-label": "Show all", onclick: () => { StateMap.view = { zoom: 1, x: 0, y: 0 }; StateMap.draw(); } }, "⤢")));
  StateMap.listen();
  new ResizeObserver(() => StateMap.draw()).observe(StateMap.svg);
  StateMap.draw();
};

StateMap.draw = function draw() {
  if (!StateMap.svg) return;
  const box = StateMap.svg.getBoundingClientRect();
  if (!box.width) return;
  const { zoom, x, y } = StateMap.view;
  const grow = Math.sqrt(zoom) * Math.min(1, box.width / 640);
  for (const point of StateMap.points) {
    point.cx = (MAP_PADDING + point.x * (box.width - 2 * MAP_PADDING)) * zoom + x;
    point.cy = (MAP_PADDING + point.y * (box.height - 2 * MAP_PADDING)) * zoom + y;
    const node = point.node;
    node.setAttribute("cx", point.cx.toFixed(1));
    node.setAttribute("cy", point.cy.toFixed(1));
    node.setAttribute("r", (point.radius * grow).toFixed(2));
    const kinds = [StateMap.hits.has(point.state) && "hit", StateMap.visited.has(point.state) && "visited", point === StateMap.cursor && "cursor", point.state === StateMap.selected && "on"];
    node.setAttribute("class", kinds.filter(Boolean).join(" "));
  }
  const route = StateMap.route.map((state) => StateMap.byState.get(state)).filter(Boolean);
  StateMap.routeNode.setAttribute("d", route.map((p, i) => `${i ? "L" : "M"}${p.cx.toFixed(1)} ${p.cy.toFixed(1)}`).join(""));
  StateMap.label(box);
};

/** Write the first word of the largest states, and of those that are marked, where labels do not overlap. */
StateMap.label = function label(box) {
  const marked = (p) => (p.state === StateMap.selected || p === StateMap.cursor ? 2 : StateMap.hits.has(p.state) || StateMap.visited.has(p.state) ? 1 : 0);
  const visible = StateMap.points.filter((p) => p.cx > 0 && p.cy > 8 && p.cx < box.width && p.cy < box.height);
  visible.sort((a, b) => marked(b) - marked(a) || b.share - a.share);
  const taken = [];
  const nodes = [];
  for (const p of visible.slice(0, 500)) {
    const text = p.words.split(" ")[0].slice(0, 16);
    const half = 3.4 * text.length + 3;
    const base = p.cy - Number(p.node.getAttribute("r")) - 3;
    const at = { l: p.cx - half, r: p.cx + half, t: base - 12, b: base + 4 };
    if (at.t < 0 || at.l < 0 || at.r > box.width || taken.some((o) => at.l < o.r && at.r > o.l && at.t < o.b && at.b > o.t)) continue;
    taken.push(at);
    nodes.push(svg("text", { x: p.cx.toFixed(1), y: base.toFixed(1), class: marked(p) ? "strong" : null }, text));
  }
  fill(StateMap.labels, nodes);
};

StateMap.zoom = function zoom(factor, cx, cy) {
  const box = StateMap.svg.getBoundingClientRect();
  const view = StateMap.view;
  const to = Math.max(1, Math.min(30, view.zoom * factor));
  const [px, py] = [cx ?? box.width / 2, cy ?? box.height / 2];
  view.x = px - ((px - view.x) * to) / view.zoom;
  view.y = py - ((py - view.y) * to) / view.zoom;
  view.zoom = to;
  if (to === 1) view.x = view.y = 0;
  StateMap.draw();
};

StateMap.nearest = function nearest(x, y, limit) {
  let best = null;
  for (const point of StateMap.points) {
    const distance = Math.max(0, Math.hypot(point.cx - x, point.cy - y) - Number(point.node.getAttribute("r")));
    if (distance <= limit) { limit = distance; best = point; }
  }
  return best;
};

StateMap.tip = function tip(point) {
  const box = StateMap.svg.getBoundingClientRect();
  const radius = Number(point.node.getAttribute("r"));
  const anchor = { left: box.left + point.cx - radius, top: box.top + point.cy - radius, width: 2 * radius, bottom: box.top + point.cy + radius };
  showTip(anchor, el("b", {}, `State ${point.state}`), ` ${percent(point.share)} of tokens`, el("div", { class: "muted" }, word(point.words)));
};

StateMap.listen = function listen() {
  const node = StateMap.svg;
  const local = (event) => { const box = node.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  let drag = null;
  node.addEventListener("wheel", (event) => { event.preventDefault(); hideTip(); StateMap.zoom(Math.exp(-event.deltaY / 400), ...local(event)); }, { passive: false });
  node.addEventListener("pointerdown", (event) => { drag = { at: local(event), x: StateMap.view.x, y: StateMap.view.y, moved: false }; });
  node.addEventListener("pointermove", (event) => {
    const [x, y] = local(event);
    if (drag && event.buttons) {
      const [dx, dy] = [x - drag.at[0], y - drag.at[1]];
      if (!drag.moved && Math.hypot(dx, dy) < 5) return;
      drag.moved = true;
      node.setPointerCapture(event.pointerId);
      hideTip();
      StateMap.view.x = drag.x + dx;
      StateMap.view.y = drag.y + dy;
      StateMap.draw();
      return;
    }
    const point = StateMap.nearest(x, y, 6);
    if (point) StateMap.tip(point); else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("click", (event) => {
    const moved = drag?.moved;
    drag = null;
    const point = moved ? null : StateMap.nearest(...local(event), 14);
    if (point) App.openState(point.state);
  });
  node.addEventListener("blur", () => { StateMap.cursor = null; hideTip(); StateMap.draw(); });
  node.addEventListener("keydown", (event) => {
    const zoom = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key];
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (zoom) StateMap.zoom(zoom, StateMap.cursor?.cx, StateMap.cursor?.cy);
    else if (step) StateMap.move(...step);
    else if (event.key === "Enter" && StateMap.cursor) App.openState(StateMap.cursor.state);
    else return;
    event.preventDefault();
  });
};

/** Move the cursor to the nearest state in a direction. */
StateMap.move = function move(dx, dy) {
  const from = StateMap.cursor || StateMap.byState.get(StateMap.selected) || StateMap.points[0];
  let best = null;
  let least = Infinity;
  for (const point of StateMap.points) {
    const along = (point.cx - from.cx) * dx + (point.cy - from.cy) * dy;
    const across = Math.abs((point.cx - from.cx) * dy) + Math.abs((point.cy - from.cy) * dx);
    if (along > 1 && along + 2 * across < least) { least = along + 2 * across; best = point; }
  }
  StateMap.cursor = StateMap.cursor ? best || from : from;
  StateMap.draw();
  StateMap.tip(StateMap.cursor);
};
