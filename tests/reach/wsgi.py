"""The site for WSGI servers."""

import sys

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()
sys.stderr.write("the site is loaded\n")  # tests wait for it: only a loaded site opens anything
