"""The dashboard: a page that follows a running session, served by bokeh in a process of its own.

session ─GET /session.json→ SessionWatcher ← status reports of workers
                                  │ once a second
                             live_page.py → browser
"""
