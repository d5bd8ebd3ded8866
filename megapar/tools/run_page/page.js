"use strict";
// Draws the figures of the page: makes options of ECharts of the data in the document. A text of a run reaches the
// document only as the text of a node, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const INK = "#0f172a", SOFT = "#64748b", LINE = "#e2e8f0", MARKS = { resume: SOFT, layout: "#ea580c", phase: "#9333ea" };
  const FONT = getComputedStyle(document.body).fontFamily;
  const text = { color: SOFT, fontSize: 11 };

  /** A number for a person: 12.5k, 0.04, 2e-4. */
  const short = (value) => {
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return `${+(value / (letter === "k" ? 1e3 : unit)).toPrecision(4)}${letter}`;
    if (size > 0 && size < 1e-3) return (+value.toPrecision(4)).toExponential().replace("e-", "e−");
    return `${+value.toPrecision(5)}`;
  };

  /** Lines of a tooltip as nodes: rows of (color, name, value) under a heading. */
  const tip = (heading, rows) => {
    const box = document.createElement("div");
    box.append(Object.assign(document.createElement("b"), { textContent: heading }));
    for (const [color, name, value] of rows) {
      const row = document.createElement("div"), dot = document.createElement("span");
      Object.assign(dot.style, { display: "inline-block", width: "9px", height: "9px", borderRadius: "2px",
        marginRight: "6px", background: color });
      row.append(dot, name ? `${name}: ` : "", Object.assign(document.createElement("b"), { textContent: value }));
      box.append(row);
    }
    return box;
  };
  const tooltip = { confine: true, borderColor: LINE, textStyle: { fontSize: 12, color: INK }, transitionDuration: 0 };
  const CAPTION = 24, ROW = 20; // height of the caption, which the chart reaches under, and of a row of the key
  const pen = document.createElement("canvas").getContext("2d");
  /** Width of the longest of some texts, in pixels. */
  const width = (texts, size) => {
    pen.font = `${size}px ${FONT}`;
    return Math.ceil(Math.max(0, ...texts.map((one) => pen.measureText(one).width)));
  };
  /** The key above a figure: its options, and where the figure begins below it. The place grows by further rows. */
  function key(names, place, more) {
    let rows = names.length > 0 ? 1 : 0, used = 0;
    for (const name of names) {
      const more = width([name], 11) + 44;
      [rows, used] = used && used + more > place.clientWidth - 24 ? [rows + 1, more] : [rows, used + more];
    }
    place.style.height = `${place.clientHeight + Math.max(0, rows - 1) * ROW}px`;
    return { top: CAPTION + 14 + rows * ROW, legend: { show: rows > 0, type: "plain", top: CAPTION + 4, left: 0,
      itemWidth: 20, itemHeight: 9, itemGap: 14, itemStyle: { opacity: 0 }, textStyle: { ...text, color: INK },
      data: names, ...more } };
  }
  const axis = (more) => ({ axisLabel: text, axisLine: { lineStyle: { color: "#94a3b8" } }, axisTick: { show: false },
    splitLine: { lineStyle: { color: LINE } }, nameTextStyle: text, ...more });
  const toolbox = { right: 0, top: -10, itemSize: 13, iconStyle: { borderColor: "#94a3b8" },
    feature: { dataZoom: { yAxisIndex: "none" } } };
  const under = (name) => ({ name, nameLocation: "middle", nameGap: 24 });

  /** The least of 1, 2, 5, 10, 20, ... that is at least a number. */
  function roundStep(least) {
    const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
    return power * [1, 2, 5, 10].find((times) => times * power >= least);
  }
  /** Options of the iterations' axis, from 0 or the first iteration, with labels at round ones only. */
  function iterations(first, last) {
    const min = first <= last / 10 || first === 1 ? 0 : first, step = roundStep((last - min) / 5);
    return axis({ type: "value", min, max: Math.max(last, min + 1), interval: min % step ? undefined : step,
      splitLine: { show: false }, axisLabel: { ...text, formatter: short, hideOverlap: true,
        showMaxLabel: last % step === 0 }, ...under("iteration") });
  }

  /** The point nearest to an iteration, of a curve whose other points were left out. */
  const nearest = (points, at) => points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
  /** The names that the key has not hidden. */
  function visible(place, names) {
    const selected = echarts.getInstanceByDom(place).getOption().legend[0].selected ?? {};
    return names.filter((name) => selected[name] !== false);
  }

  function curves(figure, place) {
    const xs = figure.curves.flatMap((curve) => [curve.points[0][0], curve.points.at(-1)[0]]);
    const first = Math.min(...xs), last = Math.max(...xs), series = [];
    const level = ({ name, value }) => ({ name, color: INK, line: "dashed", points: [[first, value], [last, value]] });
    const drawn = [...figure.curves, ...figure.levels.map(level)];
    for (const curve of drawn) {
      const faint = "mean" in curve, alone = curve.points.length === 1;
      const line = { width: faint ? 1 : 1.8, color: curve.color, type: curve.line, opacity: faint ? 0.35 : 1 };
      const common = { type: "line", name: curve.name, color: curve.color, animation: false, z: 3 };
      if (faint) // before the faint one, so that the key shows this one
        series.push({ ...common, id: `mean ${series.length}`, data: curve.mean, symbol: "none", z: 4,
          lineStyle: { width: 2, color: curve.color, type: curve.line } });
      series.push({ ...common, id: `${series.length}`, data: curve.points, lineStyle: line, symbol: "circle",
        step: curve.steps ? "end" : false, showSymbol: !!curve.dots || alone, symbolSize: 6 });
    }
    series[0].markLine = { silent: true, symbol: "none", animation: false, label: { show: false },
      data: data.marks.filter(([x]) => x > first && x <= last).map(([x, kind]) => ({ xAxis: x,
        lineStyle: { color: MARKS[kind], type: [4, 4], width: 1, opacity: 0.9 } })) };
    const { top, legend } = key(drawn.length > 1 ? drawn.map((curve) => curve.name) : [], place);
    return {
      legend, toolbox,
      tooltip: { ...tooltip, trigger: "axis", formatter: ([point]) => {
        const at = point.value[0], shown = new Set(visible(place, drawn.map((curve) => curve.name)));
        return tip(`iteration ${at}`, figure.curves.filter((curve) => shown.has(curve.name)).map((curve) => {
          const [x, y] = nearest(curve.points, at);
          return [curve.color, x === at ? curve.name : `${curve.name}, at ${x}`, `${short(y)} ${figure.unit}`];
        }));
      } },
      grid: { left: 8, right: 16, top, bottom: 22, containLabel: true },
      xAxis: iterations(first, last),
      yAxis: axis({ type: "value", scale: !figure.zero, axisLine: { show: false }, splitNumber: 4,
        axisLabel: { ...text, formatter: short } }),
      series,
    };
  }

  function bars(figure, place) {
    const total = figure.bars.map((_, row) => figure.parts.reduce((sum, part) => sum + part.values[row], 0));
    const most = Math.max(...total), { top, legend } = key(figure.parts.map((part) => part.name), place, { itemStyle: {} });
    const left = width(figure.bars, 12) + 12, end = Math.max(most, figure.limit ?? 0) * 1.02;
    const fits = (value, label) => (value / end) * (place.clientWidth - left - 84) > width([label], 11) + 4 ? label : "";
    return {
      legend,
      tooltip: { ...tooltip, trigger: "item",
        formatter: (bar) => tip(bar.name, [[bar.color, bar.seriesName, `${short(bar.value)} ${figure.unit}`]]) },
      grid: { left, right: 84, top, bottom: 24 },
      xAxis: axis({ type: "value", axisLabel: { ...text, formatter: short, showMaxLabel: !figure.limit },
        max: figure.limit ? end : undefined }),
      yAxis: axis({ type: "category", data: figure.bars, inverse: true, axisLabel: { fontSize: 12, color: INK } }),
      series: [
        ...figure.parts.map((part) => ({ type: "bar", stack: "all", name: part.name, color: part.color, barWidth: 24,
          animation: false, data: part.values, itemStyle: { borderColor: "#fff", borderWidth: 1 },
          label: { show: true, color: "#fff", fontSize: 11,
            formatter: (bar) => fits(bar.value, short(+bar.value.toPrecision(3))) } })),
        { type: "bar", stack: "all", data: total.map(() => 0), animation: false, silent: true, tooltip: { show: false },
          markLine: { silent: true, symbol: "none", animation: false, label: { show: false },
            lineStyle: { color: "#dc2626", width: 1.5, type: "solid" }, data: figure.limit ? [{ xAxis: figure.limit }] : [] },
          label: { show: true, position: "right", color: INK, fontSize: 12, fontWeight: 600,
            formatter: (bar) => `${short(+total[bar.dataIndex].toPrecision(3))} ${figure.unit}` } },
      ],
    };
  }

  function heat(figure, place, chosen) {
    const across = figure.columns.length;
    const cells = Array.from(figure.maps[chosen], (letter, place) => [place % across, Math.floor(place / across),
      figure.letters.indexOf(letter) / figure.levels - figure.octaves]); // the logarithm of the load
    const step = roundStep((figure.columns.at(-1) - figure.columns[0]) / 6);
    const stretch = (index) => Math.floor(figure.columns[index] / step);
    const label = (_, index) => ((index ? stretch(index) > stretch(index - 1) : !(figure.columns[0] % step)) ? short(stretch(index) * step) : "");
    return {
      tooltip: { ...tooltip, formatter: (cell) => tip(
        `${figure.names[cell.value[1]]}, iteration ${figure.columns[cell.value[0]]}`,
        [[cell.color, "", `${short(+(2 ** cell.value[2]).toPrecision(2))} of the mean`]]) },
      grid: { left: width(figure.names, 11) + 12, right: 84, top: CAPTION + 14, bottom: 42 },
      xAxis: axis({ type: "category", data: figure.columns, ...under("iteration"),
        splitLine: { show: false }, axisLabel: { ...text, interval: 0, formatter: label } }),
      yAxis: axis({ type: "category", data: figure.names, inverse: true, splitLine: { show: false } }),
      visualMap: { type: "piecewise", dimension: 2, right: 0, top: CAPTION + 12, itemWidth: 14, itemHeight: 13, itemGap: 3, align: "left",
        textStyle: text, hoverLink: true, pieces: scaleOfLoads.map(([low, high, color, label]) =>
          ({ gte: low, lt: high, color, label })) },
      series: [{ type: "heatmap", data: cells, animation: false, progressive: 0,
        itemStyle: { borderWidth: across > 30 || figure.names.length > 30 ? 0 : 0.5, borderColor: "#fff" } }],
    };
  }
  // Blue is idle, red is overloaded; the same in every map.
  const scaleOfLoads = [
    [2.5, 9, "#7f1d1d", "≥ 5.7"], [1.5, 2.5, "#b91c1c", "4"], [0.75, 1.5, "#ef4444", "2"], [0.25, 0.75, "#fca5a5", "1.4"],
    [-0.25, 0.25, "#f1f5f9", "1"], [-0.75, -0.25, "#bfdbfe", "0.7"], [-1.5, -0.75, "#60a5fa", "1/2"],
    [-2.5, -1.5, "#2563eb", "1/4"], [-9, -2.5, "#1e3a8a", "≤ 0.18"],
  ];

  const LANES = ["#2563eb", "#0891b2", "#64748b", "#ea580c", "#059669", "#9333ea", "#db2777", "#65a30d"];
  function spans(figure, place) {
    const colors = Object.fromEntries(figure.key.map((entry) => [entry.name, entry.color]));
    const color = (span) => colors[figure.names[span[3]]] || LANES[span[0] % LANES.length];
    const end = Math.max(...figure.spans.map((span) => span[2]));
    const { top, legend } = key(figure.key.map((entry) => entry.name), place, { selectedMode: false, itemStyle: {} });
    return {
      legend, toolbox,
      tooltip: { ...tooltip, formatter: (span) => tip(figure.lanes[span.value[0]], [[color(span.value),
        figure.names[span.value[3]], `${short(span.value[2] - span.value[1])} ${figure.unit}, from ${short(span.value[1])}`]]) },
      grid: { left: width(figure.lanes, 12) + 12, right: 16, top, bottom: 42 },
      dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", filterMode: "weakFilter" }],
      xAxis: axis({ type: "value", max: end, axisLabel: { ...text, formatter: short, hideOverlap: true },
        ...under(`time, ${figure.unit}`) }),
      yAxis: axis({ type: "category", data: figure.lanes, inverse: true, axisLabel: { fontSize: 12, color: INK } }),
      series: [
        { type: "custom", animation: false, data: figure.spans, encode: { x: [1, 2], y: 0 }, clip: true,
          renderItem: (_, api) => {
            const [left, middle] = api.coord([api.value(1), api.value(0)]), right = api.coord([api.value(2), 0])[0];
            const height = api.size([0, 1])[1] * 0.62;
            const span = [0, 1, 2, 3].map((place) => api.value(place));
            return { type: "rect", style: { fill: color(span) },
              shape: { x: left, y: middle - height / 2, width: Math.max(right - left, 0.6), height } };
          } },
        ...figure.key.map((entry) => ({ type: "bar", name: entry.name, color: entry.color, data: [] })),
      ],
    };
  }

  function scatter(figure, place) {
    const { top, legend } = key(figure.groups.map((group) => group.name), place, { itemStyle: {} });
    const log = (name, more) => axis({ type: "log", name, nameLocation: "middle", scale: true, ...more,
      axisLabel: { ...text, formatter: short, hideOverlap: true } });
    return {
      legend, toolbox,
      tooltip: { ...tooltip, formatter: (point) => tip(point.value[2],
        [0, 1].map((one) => [point.color, figure.axes[one], short(point.value[one])])) },
      grid: { left: 30, right: 24, top, bottom: 34, containLabel: true },
      xAxis: log(figure.axes[0], { nameGap: 26 }),
      yAxis: log(figure.axes[1], { nameGap: 44 }),
      series: figure.groups.map((group) => ({ type: "scatter", name: group.name, color: group.color, animation: false,
        symbolSize: group.points.length === 1 ? 16 : 7, itemStyle: { opacity: 0.75 }, data: group.points })),
    };
  }

  const draw = { curves, bars, heat, spans, scatter };
  for (const place of document.querySelectorAll("[data-figure]")) {
    const figure = data.figures[+place.dataset.figure];
    const choice = place.parentElement.querySelector("select");
    const options = draw[figure.kind](figure, place, choice ? choice.value : 0);
    const chart = echarts.init(place, null, { renderer: "svg" });
    chart.setOption({ textStyle: { fontFamily: FONT }, ...options });
    choice?.addEventListener("change", () => chart.setOption({ series: heat(figure, place, choice.value).series }));
    addEventListener("resize", () => chart.resize());
  }
})();
