// Keeps the page up to date: the server says by /live that there is something new, and the page is fetched and patched.
// Only what differs is replaced, so that focus, selection and scrolling stay.
"use strict";

let fetching = false;
let again = false;

function patch(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || fresh.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  if (old.nodeName === "FORM") return; // what the user types stays
  const known = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  const kept = new Set([...fresh.children].map((child) => child.id).filter((id) => known.has(id)));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const same = child.id && known.get(child.id);
    if (same) {
      if (same !== at) old.insertBefore(same, at);
      else at = at.nextSibling;
      patch(same, child);
    } else if (at && !kept.has(at.id) && at.nodeType === child.nodeType) {
      const next = at.nextSibling;
      patch(at, child);
      at = next;
    } else {
      old.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

async function update() {
  if (document.hidden) { again = true; return; }
  if (fetching) { again = true; return; }
  fetching = true;
  again = false;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const start = performance.now();
    patch(document.getElementById("main"), fresh.getElementById("main"));
    patch(document.getElementById("head-line"), fresh.getElementById("head-line"));
    performance.measure("update", { start, end: performance.now() });
  } catch {
    lost();
  } finally {
    fetching = false;
    if (again && !document.hidden) update();
  }
}

function lost() {
  const shown = document.getElementById("state");
  shown.textContent = "connection lost";
  shown.className = "live bad";
}

const live = new EventSource("/live");
live.addEventListener("sample", update);
live.addEventListener("error", lost);
document.addEventListener("visibilitychange", () => { if (!document.hidden && again) update(); });
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  const field = document.getElementById("q");
  if (event.key === "/" && field && !typing) { event.preventDefault(); field.focus(); }
});
