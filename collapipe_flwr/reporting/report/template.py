"""The page of a report, as Jinja templates that escape whatever is put into them."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ css | safe }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
{% if reason %}<p class="warning" id="reason">{{ reason }}</p>{% endif %}
<p class="quiet">{{ made }}</p>
{% if tiles %}
<div class="tiles" id="overview">
{% for tile in tiles %}
<div class="card tile">
<div class="quiet">{{ tile.title }}</div>
<div class="value{{ ' warning' if tile.warning }}">{{ tile.value }}</div>
<div class="quiet">{{ tile.note }}</div>
</div>
{% endfor %}
</div>
{% endif %}
{% for note in notes %}<p class="quiet">{{ note }}</p>{% endfor %}
<nav>
{% for section in sections %}
<a href="#{{ section.key }}">{{ section.title }}</a>
{% endfor %}
</nav>
<noscript><p class="warning">The charts need JavaScript; the tables do not.</p></noscript>
</header>
<main>
{% for section in sections %}
{% include "section" %}
{% endfor %}
</main>
<footer class="quiet">Made from events.jsonl and summary.json; to make it
anew: <code>collapipe report RUN</code>.</footer>
<script type="application/json" id="charts">{{ charts | tojson }}</script>
<script>{{ plotly | safe }}</script>
<script>{{ script | safe }}</script>
{{ tail | safe }}
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
