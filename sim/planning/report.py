def render_plan(plan):
    return ""
