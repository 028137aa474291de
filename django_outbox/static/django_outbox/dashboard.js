// Draws the charts and keeps the dashboard up to date. The pages are whole without it.
"use strict";

(() => {
  const EVERY = 15_000; // milliseconds between two refreshes, while the page is visible
  const MOST = 300_000; // milliseconds between two refreshes of a server that is slow or away
  const SHARE = 50; // the server answers for at most this part of the time: a 50th
  const LEAST = 0.001; // seconds where the scale of a chart of times begins
  const root = document.documentElement;
  const from = document.querySelector("[data-refresh]")?.dataset.refresh; // only on the dashboard
  const pause = document.querySelector(".outbox-pause");
  const lost = document.querySelector(".outbox-lost");
  const plots = new Map(); // by the name of the chart
  let data = read(document);
  let timer = 0;
  let wait = EVERY;

  function read(page) {
    const found = JSON.parse(page.getElementById("outbox-data").textContent);
    const count = found.charts[0].series[0].values.length;
    found.times = Array.from({ length: count }, (each, at) => found.first + at * found.span);
    return found;
  }

  // --- charts -----------------------------------------------------------------------------------

  // Other themes of the admin than Django's may lack a colour.
  const colour = (name, otherwise) => getComputedStyle(root).getPropertyValue(name).trim() || otherwise;
  const DASHES = { p95: [8, 3], p99: [2, 3], rescued: [8, 3], deferred: [2, 3] };

  function shown(value, unit) {
    if (value == null) return "–";
    if (unit === "seconds") {
      if (value >= 7200) return `${Math.floor(value / 3600)} h`;
      if (value >= 60) return `${Math.floor(value / 60)} min`;
      if (value >= 1) return `${digits(value)} s`;
      return value === 0 ? "0 s" : `${digits(value * 1000)} ms`;
    }
    return digits(value);
  }

  const digits = (value) => String(value >= 10 ? Math.round(value) : Number(value.toPrecision(2)));

  // A value between two gaps makes no line, so it is shown as a point.
  function alone(values) {
    return (plot, number) =>
      plot.data[number]
        .map((value, at) => at)
        .filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);
  }

  function line(series) {
    const stroke = colour(`--outbox-${series.tone}`);
    return {
      label: series.label,
      stroke,
      width: series.tone === "dead" ? 2.5 : 1.5,
      dash: DASHES[series.tone],
      fill: series.tone === "done" ? `${stroke}22` : undefined,
      points: { show: true, size: 5, fill: stroke, filter: alone(series.values) },
    };
  }

  function axes(chart) {
    const text = getComputedStyle(document.body);
    const stroke = colour("--body-quiet-color", text.color);
    const grid = { stroke: colour("--hairline-color", "#88888844"), width: 1 };
    const font = `11px ${text.fontFamily}`;
    const look = { stroke, font, grid, ticks: { ...grid, size: 4 } };
    const isLog = chart.unit === "seconds" && chart.name !== "lag";
    return [
      { ...look, size: 28, space: 60, values: clock },
      {
        ...look,
        size: 56,
        space: 24,
        values: (plot, splits) => splits.map((each) => (each == null ? "" : shown(each, chart.unit))),
        ...(isLog && { filter: powers, grid: { ...grid, filter: powers }, ticks: { show: false } }),
        ...(chart.unit === "count" && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }),
      },
    ];
  }

  const powers = (plot, splits) =>
    splits.map((each) => (Math.abs(Math.log10(each) - Math.round(Math.log10(each))) < 1e-6 ? each : null));

  function clock(plot, splits, axis, space, step) {
    const style = step >= 86400 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
    const format = new Intl.DateTimeFormat(root.lang || undefined, { ...style, timeZone: zone() });
    return splits.map((each) => format.format(new Date(each * 1000)));
  }

  // The server's time zone, as in the tables; the browser's, if it does not know that one.
  function zone() {
    try {
      return new Intl.DateTimeFormat("en", { timeZone: data.zone }).resolvedOptions().timeZone;
    } catch (error) {
      return undefined;
    }
  }

  function scales(chart) {
    if (chart.unit === "seconds" && chart.name !== "lag") {
      const range = (plot, low, high) => [LEAST, 10 ** Math.ceil(Math.log10(Math.max(high ?? 0, 1)))];
      return { x: {}, y: { distr: 3, range } };
    }
    const least = chart.unit === "seconds" ? 1 : chart.unit === "count" ? 2 : 1;
    return { x: {}, y: { range: (plot, low, high) => [0, Math.max((high ?? 0) * 1.1, least)] } };
  }

  function values(chart) {
    const lift = (each) => (each == null ? null : Math.max(each, LEAST));
    const isLog = chart.unit === "seconds" && chart.name !== "lag";
    return [data.times, ...chart.series.map((each) => (isLog ? each.values.map(lift) : each.values))];
  }

  function draw(chart) {
    const place = document.querySelector(`[data-chart="${chart.name}"]`);
    place.replaceChildren();
    const plot = new uPlot(
      {
        width: place.clientWidth,
        height: place.clientHeight,
        tzDate: (seconds) => (zone() ? uPlot.tzDate(new Date(seconds * 1000), zone()) : new Date(seconds * 1000)),
        legend: { show: false },
        cursor: { sync: { key: "outbox" }, drag: { x: false, y: false }, y: false },
        scales: scales(chart),
        axes: axes(chart),
        series: [{}, ...chart.series.map(line)],
        hooks: { setCursor: [(each) => tell(chart.name, each.cursor.idx)] },
      },
      values(chart),
      place,
    );
    plots.set(chart.name, plot);
  }

  function drawAll() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    data.charts.forEach(draw);
  }

  // Where the mouse points, the legend shows that time's values; else the latest.
  function tell(name, at) {
    const chart = data.charts.find((each) => each.name === name);
    const places = document.querySelectorAll(`#outbox-${name}-legend [data-value]`);
    chart.series.forEach((each, number) => {
      const found = at == null ? each.values.findLast((value) => value != null) : each.values[at];
      const unit = chart.unit === "rate" ? "/min" : "";
      places[number].textContent = shown(found, chart.unit) + (found == null ? "" : unit);
    });
  }

  // --- the page ---------------------------------------------------------------------------------

  // A part with the keyboard focus keeps its content until the next refresh.
  function renew(page) {
    for (const old of document.querySelectorAll("[data-part]")) {
      const fresh = page.querySelector(`[data-part="${old.dataset.part}"]`);
      const isIn = old.contains(document.activeElement);
      if (fresh && !isIn && !fresh.isEqualNode(old)) old.replaceWith(document.adoptNode(fresh));
    }
    data = read(page);
    for (const chart of data.charts) plots.get(chart.name)?.setData(values(chart));
  }

  async function refresh() {
    clearTimeout(timer);
    const started = performance.now();
    let fault = lost.dataset.failed;
    try {
      const answer = await fetch(from, { credentials: "same-origin", cache: "no-store" });
      const text = answer.redirected || !answer.ok ? "" : await answer.text();
      if (text) renew(new DOMParser().parseFromString(text, "text/html"));
      if (text) fault = "";
      else if (answer.redirected || answer.status === 403) fault = lost.dataset.away;
    } catch (error) {
      // The server does not answer, or this is not its answer: the fault is shown.
    }
    say(fault);
    const busy = (performance.now() - started) * SHARE;
    wait = Math.min(Math.max(EVERY, fault ? wait * 2 : busy), MOST);
    later();
  }

  function say(text) {
    if (lost.textContent !== text) lost.textContent = text;
    lost.hidden = !text;
  }

  function later() {
    clearTimeout(timer);
    const isStill = document.hidden || pause.getAttribute("aria-pressed") === "true";
    if (!isStill) timer = setTimeout(refresh, wait);
  }

  // --- begin ------------------------------------------------------------------------------------

  function keepUpToDate() {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      const isPaused = pause.getAttribute("aria-pressed") !== "true";
      pause.setAttribute("aria-pressed", String(isPaused));
      if (isPaused) clearTimeout(timer);
      else refresh();
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
    later();
  }

  const theme = new MutationObserver(drawAll);
  theme.observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const sizes = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      const plot = plots.get(target.dataset.chart);
      if (plot && plot.width !== target.clientWidth) {
        plot.setSize({ width: target.clientWidth, height: target.clientHeight });
      }
    }
  });
  drawAll();
  for (const place of document.querySelectorAll("[data-chart]")) sizes.observe(place);
  if (from) keepUpToDate();
})();
