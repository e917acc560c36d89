"""The page of a report: Jinja templates that escape whatever is put into them, and its look.

The CSS is for light and dark, narrow and wide, and for paper. A FAB carries no files of these
kinds, so the page's parts are Python strings.
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ page.title }}</title>
<link rel="icon" href="data:,">
<style>{{ css | safe }}</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
{% if page.reason %}<p class="warning" id="reason">{{ page.reason }}</p>{% endif %}
<p class="quiet">{{ page.made }}</p>
{% if page.tiles %}
<div class="tiles" id="overview">
{% for tile in page.tiles %}
<div class="card tile">
<div class="quiet">{{ tile.title }}</div>
<div class="value{{ ' warning' if tile.warning }}">{{ tile.value }}</div>
<div class="quiet">{{ tile.note }}</div>
</div>
{% endfor %}
</div>
{% endif %}
{% for note in page.notes %}<p class="quiet">{{ note }}</p>{% endfor %}
<nav>
{% for section in page.sections %}
<a href="#{{ section.key }}">{{ section.title }}</a>
{% endfor %}
</nav>
<noscript><p class="warning">The charts need JavaScript; the tables do not.</p></noscript>
</header>
<main>
{% for section in page.sections %}
{% include "section" %}
{% endfor %}
</main>
<footer class="quiet">Made from events.jsonl and summary.json; to make it
anew: <code>collapipe report RUN</code>.</footer>
<script type="application/json" id="charts">{{ page.charts | tojson }}</script>
<script>{{ plotly | safe }}</script>
<script>{{ script | safe }}</script>
</body>
</html>
"""

SECTION = """<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
{% if section.text %}<p class="quiet">{{ section.text }}</p>{% endif %}
{% if not section.charts and not section.tables %}
<p class="quiet empty">{{ section.empty }}</p>
{% endif %}
{% if section.charts %}
<div class="charts">
{% for chart in section.charts %}
<div class="card">
<h3>{{ chart.title }}</h3>
{% if chart.note %}<p class="quiet">{{ chart.note }}</p>{% endif %}
{% if chart.choices | length > 1 %}
<select data-choices="{{ chart.key }}" aria-label="cluster">
{% for name in chart.choices %}<option value="{{ name }}">{{ name }}</option>{% endfor %}
</select>
{% endif %}
<div class="chart" data-chart="{{ chart.key }}" role="img" aria-label="{{ chart.title }}"></div>
</div>
{% endfor %}
</div>
{% endif %}
{% for table in section.tables %}
<div class="card">
{% if table.folded %}
<details><summary>{{ table.title }}</summary>
{% else %}
<h3>{{ table.title }}</h3>
{% endif %}
{% if table.note %}<p class="quiet">{{ table.note }}</p>{% endif %}
<div class="scroll"><table>
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td{{ ' class=long' if cell | length > 28 }}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% if table.folded %}</details>{% endif %}
</div>
{% endfor %}
</section>
"""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --text: #1b1f24; --quiet: #59616b; --rule: #dfe3e8;
  --accent: #0072b2; --warning: #b84a00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #181c22; --text: #e8ebef; --quiet: #a3acb7; --rule: #2e353e;
    --accent: #56b4e9; --warning: #ff9a5c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
header, main, footer { max-width: 1440px; margin: 0 auto; padding: 0 clamp(12px, 3vw, 32px); }
header { padding-top: 24px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.quiet { color: var(--quiet); font-size: .875rem; overflow-wrap: anywhere; }
.warning { color: var(--warning); }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0; font-size: .9rem; }
a { color: var(--accent); }
.tiles {
  display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  margin: 16px 0;
}
.card {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px;
  min-width: 0;
}
.tile .value { font-size: 1.35rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
section { margin: 28px 0; }
.charts {
  display: grid; gap: 12px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
}
.chart { min-height: 150px; width: 100%; }
section > .card { margin-top: 12px; }
select {
  font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 2px 6px; margin: 4px 0; max-width: 100%;
}
.scroll { overflow: auto; max-height: 32rem; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
caption, summary { text-align: left; font-weight: 600; }
summary { cursor: pointer; }
th, td {
  text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; font-variant-numeric: tabular-nums;
}
td { min-width: 4.5rem; white-space: nowrap; }
td.long { min-width: 17rem; overflow-wrap: anywhere; white-space: normal; }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; }
footer { padding-top: 8px; padding-bottom: 32px; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --card: #fff; --text: #000; --quiet: #444; --rule: #bbb; --accent: #000;
    --warning: #933b00;
  }
  body { font-size: 11pt; }
  header, main, footer { max-width: none; padding: 0; }
  @page { margin: 14mm; }
  nav { display: none; }
  section > .quiet { break-after: avoid; }
  .charts { display: block; }
  .charts .card + .card { margin-top: 12px; }
  .card { break-inside: avoid; border-color: #ccc; }
  .card:has(table) { break-inside: auto; }
  .scroll { overflow: visible; max-height: none; }
  tr, h2, h3 { break-inside: avoid; break-after: avoid; }
}
"""
