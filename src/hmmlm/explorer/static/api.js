"use strict";
// Questions to the server. An exported page has recorded answers instead.

const recorded = (() => {
  const data = $("recorded");
  if (!data) return null;
  const key = (name, fields) => `${name} ${JSON.stringify(Object.entries(fields).sort())}`;
  const answers = new Map(JSON.parse(data.textContent).map((item) => [key(item.name, item.fields), item.answer]));
  return { get: (name, fields) => answers.get(key(name, fields)) };
})();

const STOPPED = "The server has stopped. What you see stays; start hmmlm explore again, and this page continues.";
const NOT_RECORDED = "This is an exported page, without its model: hmmlm explore answers this.";

/** Return the answer of an endpoint; an error has a message for the reader. */
async function ask(name, fields = {}) {
  if (recorded) {
    const found = recorded.get(name, fields);
    if (found === undefined) throw new Error(NOT_RECORDED);
    return found;
  }
  let response;
  try {
    response = await fetch(`api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields) });
  } catch {
    lostServer();
    throw new Error(STOPPED);
  }
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

let waiting = false;

/** Say that the server is gone, and look for it until it is back. */
function lostServer() {
  const notice = $("notice");
  notice.textContent = STOPPED;
  notice.hidden = false;
  if (waiting) return;
  waiting = true;
  const timer = setInterval(async () => {
    try {
      const response = await fetch("api/model", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
      if (!response.ok) return;
    } catch {
      return;
    }
    clearInterval(timer);
    waiting = false;
    notice.hidden = true;
    document.dispatchEvent(new Event("back"));
  }, 1500);
}

/** Let one question of a kind run at a time; of those that arrive meanwhile, only the newest is asked. */
function latest(run) {
  let running = false;
  let next = null;
  return async function schedule(...args) {
    next = args;
    if (running) return;
    running = true;
    while (next) {
      const now = next;
      next = null;
      await run(...now);
    }
    running = false;
  };
}
