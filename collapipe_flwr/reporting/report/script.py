"""What a report does in a browser: puts colours into figures and lets plotly.js draw them.

Whoever updates a page that is open calls ``report.show(key, chart)`` with a chart as it stands in
the page's own data.
"""

SCRIPT = """
"use strict";
const report = (() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const PAPER_PIXELS = 640, LEAST_CELL_PIXELS = 30;
  let printing = false;
  const themes = {
    light: {
      c0: "#0072b2", c1: "#d55e00", c2: "#009e73", c3: "#b5679a", c4: "#c98700", c5: "#56b4e9",
      muted: "#9aa1aa", warning: "#d55e00", band: "rgba(0,114,178,0.20)",
      scale: [[0, "#edf4fa"], [1, "#5b9fd3"]],
      text: "#1b1f24", grid: "#e6e9ed", card: "#ffffff",
    },
    dark: {
      c0: "#56b4e9", c1: "#f28e3d", c2: "#3ecf9f", c3: "#e3a0c8", c4: "#e8dc4f", c5: "#b3a5ff",
      muted: "#7f8894", warning: "#f28e3d", band: "rgba(86,180,233,0.25)",
      scale: [[0, "#1c3042"], [1, "#3f7fb5"]],
      text: "#dfe3e8", grid: "#2b323b", card: "#181c22",
    },
  };
  const theme = () => (dark.matches && !printing ? themes.dark : themes.light);

  function painted(value, key) {
    if (typeof value === "string") {
      const colour = /color/.test(key) && value[0] === "@" && theme()[value.slice(1)];
      return colour || value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "object" ? value.map((each) => painted(each, "")) : value;
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k)]));
  }

  function laidOut(layout) {
    const colours = theme();
    const axis = (own) => ({
      automargin: true, gridcolor: colours.grid, linecolor: colours.muted,
      zerolinecolor: colours.grid, fixedrange: touch.matches, ...own,
    });
    const font = { color: colours.text };
    const label = { bgcolor: colours.card, bordercolor: colours.muted, font };
    return {
      height: 320,
      margin: { l: 48, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colours.text, size: 12, family: getComputedStyle(document.body).fontFamily },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      hoverlabel: label, showlegend: true, dragmode: touch.matches ? false : "zoom",
      uirevision: "kept",
      ...layout,
      ...(printing ? { width: PAPER_PIXELS, autosize: false } : { autosize: true }),
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    };
  }

  const buttons = ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"];
  const config = () => ({
    responsive: true, displaylogo: false, modeBarButtonsToRemove: buttons,
    displayModeBar: touch.matches || printing ? false : "hover",
  });

  function chosen(key) {
    const chart = charts[key];
    if (chart.figure) return chart.figure;
    const select = document.querySelector(`select[data-choices="${CSS.escape(key)}"]`);
    return chart.choices[select ? select.value : Object.keys(chart.choices)[0]];
  }

  // Texts of cells that are too narrow for them would be drawn too small to read.
  function legible(trace, width) {
    if (trace.type !== "heatmap" || width > LEAST_CELL_PIXELS * (trace.x.length + 4)) return trace;
    return { ...trace, texttemplate: "" };
  }

  function draw(key) {
    const element = document.querySelector(`[data-chart="${CSS.escape(key)}"]`);
    const figure = element && chosen(key);
    if (!figure) return Promise.resolve();
    const width = printing ? PAPER_PIXELS : element.clientWidth;
    const data = painted(figure.data, "").map((trace) => legible(trace, width));
    return Plotly.react(element, data, laidOut(painted(figure.layout, "")), config());
  }

  const drawAll = () => Promise.all(Object.keys(charts).map(draw));

  function show(key, chart) {
    charts[key] = chart;
    return draw(key);
  }

  document.addEventListener("change", (event) => {
    const key = event.target.dataset.choices;
    if (key) draw(key);
  });
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    printing = true;
    for (const details of document.querySelectorAll("details")) details.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  const ready = drawAll().then(() => document.body.classList.add("drawn"));
  return { charts, draw, drawAll, show, ready };
})();
"""
