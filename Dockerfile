# An image with fastrt from its wheel, for `fastrt manifest`. `make wheels` writes the wheels into wheelhouse/.
#
#   docker build -t fastrt .
#
# A program's image adds the program:
#
#   FROM fastrt
#   COPY app.py .
FROM python:3.13-slim-trixie

COPY wheelhouse/fastrt-*-cp313-cp313-*.whl /tmp/wheels/
RUN pip install --no-cache-dir --root-user-action=ignore /tmp/wheels/*.whl && rm -r /tmp/wheels
RUN useradd --create-home --uid 1000 fastrt
USER 1000
WORKDIR /home/fastrt
CMD ["fastrt", "doctor"]
