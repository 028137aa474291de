// Keeps the dashboard up to date. The page is whole without it.
"use strict";

(() => {
  const EVERY = 5_000; // milliseconds between two refreshes, while the page is visible
  const STALE = 3_000; // milliseconds without an answer, after which the page is grey
  const ABORTED = 10_000; // milliseconds without an answer, after which it is awaited no longer
  const MOST = 300_000; // milliseconds between two refreshes of a server that is slow or away
  const SHARE = 50; // the server answers for at most this part of the time: a 50th
  const from = document.querySelector("[data-refresh]").dataset.refresh;
  const pause = document.querySelector(".outbox-pause");
  const lost = document.querySelector(".outbox-lost");
  let timer = 0;
  let wait = EVERY;
  let answered = new Date().toLocaleTimeString();

  // A part with the keyboard focus keeps its content until the next refresh.
  function renew(page) {
    for (const old of document.querySelectorAll("[data-part]")) {
      const fresh = page.querySelector(`[data-part="${old.dataset.part}"]`);
      const isIn = old.contains(document.activeElement);
      if (fresh && !isIn && !fresh.isEqualNode(old)) old.replaceWith(document.adoptNode(fresh));
    }
  }

  async function refresh() {
    clearTimeout(timer);
    const started = performance.now();
    const slow = setTimeout(() => say(lost.dataset.failed), STALE);
    const signal = AbortSignal.timeout(ABORTED);
    let fault = lost.dataset.failed;
    try {
      const answer = await fetch(from, { credentials: "same-origin", cache: "no-store", signal });
      const text = answer.redirected || !answer.ok ? "" : await answer.text();
      if (text) renew(new DOMParser().parseFromString(text, "text/html"));
      if (text) [fault, answered] = ["", new Date().toLocaleTimeString()];
      else if (answer.redirected || answer.status === 403) fault = lost.dataset.away;
    } catch (error) {
      // The server does not answer, or this is not its answer: the fault is shown.
    }
    clearTimeout(slow);
    say(fault);
    const busy = (performance.now() - started) * SHARE;
    wait = Math.min(Math.max(EVERY, fault ? wait * 2 : busy), MOST);
    later();
  }

  function say(fault) {
    const time = document.querySelector('[data-part="clock"] time')?.textContent || answered;
    const text = fault.replace("{time}", time);
    if (lost.textContent !== text) lost.textContent = text;
    lost.hidden = !text;
    document.querySelector("[data-refresh]").classList.toggle("outbox-stale", Boolean(text));
  }

  function later() {
    clearTimeout(timer);
    const isStill = document.hidden || pause.getAttribute("aria-pressed") === "true";
    if (!isStill) timer = setTimeout(refresh, wait);
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    const isPaused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) clearTimeout(timer);
    else refresh();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
  later();
})();
