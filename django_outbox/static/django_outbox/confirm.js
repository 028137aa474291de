// Says how long it takes at the rate in the form. The page lists some rates without it.
"use strict";

(() => {
  const output = document.querySelector("output[data-count]");
  if (!output) return;
  const rate = document.getElementById("id_rate");
  const limit = document.getElementById("id_limit");
  const UNITS = { s: 1, m: 60, h: 3600 };

  function say() {
    const [, number, unit] = /^([0-9.]+)\/([smh])$/.exec(rate.value) || [];
    const count = Math.min(Number(output.dataset.count), Number(limit?.value) || Infinity);
    const seconds = (count / Number(number)) * UNITS[unit];
    output.textContent = Number.isFinite(seconds) ? inWords(seconds) : "";
  }

  function inWords(seconds) {
    if (seconds < 60) return `≈ ${Math.ceil(seconds)} s`;
    if (seconds < 3600) return `≈ ${Math.round(seconds / 60)} min`;
    if (seconds < 172800) return `≈ ${(seconds / 3600).toFixed(1)} h`;
    return `≈ ${Math.round(seconds / 86400)} d`;
  }

  for (const each of [rate, limit]) each?.addEventListener("input", say);
  say();
})();
