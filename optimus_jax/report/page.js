// Draws the charts of a page in the reader's colour scheme, and smooths their lines.
"use strict";
(() => {
  const { figures, dark } = JSON.parse(document.getElementById("charts").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const slider = document.getElementById("smoothing");
  const options = { responsive: true, displayModeBar: false };

  // The figure with the colours of a dark screen; only values of keys about colour are replaced.
  function darkened(value, key) {
    if (typeof value === "string") {
      return /color/i.test(key)
        ? value.replace(/#[0-9a-f]{6}/gi, (found) => dark[found.toLowerCase()] ?? found)
        : value;
    }
    if (Array.isArray(value)) return value.map((item) => darkened(item, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, item]) => [name, darkened(item, name)]),
    );
  }

  // Exponential moving average without the bias of its beginning; nulls are gaps and stay.
  function smoothed(values, weight) {
    let sum = 0;
    let share = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  }

  function draw(isDark) {
    const weight = slider ? Number(slider.value) : 0;
    for (const [name, figure] of Object.entries(figures)) {
      const { data, layout } = isDark ? darkened(figure, "") : figure;
      const traces = data.map((trace) =>
        trace.meta === "smooth" && weight > 0
          ? { ...trace, y: smoothed(trace.y, weight) }
          : trace,
      );
      // Plotly keeps what it is given; a copy leaves the figures as they were.
      Plotly.react(`${name}-chart`, structuredClone(traces), structuredClone(layout), options);
    }
  }

  const redraw = () => draw(scheme.matches);
  redraw();
  scheme.addEventListener("change", redraw);
  if (slider) slider.addEventListener("input", redraw);
  addEventListener("beforeprint", () => draw(false));
  addEventListener("afterprint", redraw);
})();
