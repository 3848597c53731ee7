# JupyterLab with ddpnb and its lessons, and torch for CPUs, with the versions that the tests pass with.
#   docker build -t ddpnb . && docker run --rm -p 127.0.0.1:8888:8888 ddpnb
FROM python:3.11-slim

WORKDIR /opt/ddpnb
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ddpnb ddpnb
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[lab]'

# The lessons belong to a user without rights. With another user, also set HOME:
#   docker run --user 4242 --env HOME=/tmp --rm -p 127.0.0.1:8888:8888 ddpnb
RUN useradd --create-home --uid 1000 student
COPY --chown=student notebooks /home/student/course/notebooks
COPY --chown=student data /home/student/course/data
USER student
WORKDIR /home/student/course
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--LabApp.default_url=/lab/tree/notebooks/01_first_comparison.ipynb"]
